"""Whether weights match a model, from their configuration and headers; imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.model_config import ModelConfig
from gpt2.records.files import read_resolved_config
from gpt2.weights import hf
from gpt2.weights.source import (
    CONFIG_FILE,
    is_native,
    opened_weights,
    read_settings,
    run_of,
    weight_files,
)
from lib.errors import PreflightError, Problem
from lib.units import first_of

# Dtypes that convert to float32 without rounding.
_DTYPES = {"F32", "F16", "BF16"}


def weight_mismatches(folder: Path, model: ModelConfig) -> list[Problem]:
    """Return every mismatch of a folder's weights with ``model``, from headers. Raises PreflightError."""
    _, *weights = weight_files(folder)
    if is_native(folder):
        texts = _native_mismatches(model, read_resolved_config(run_of(folder)).model)
    else:
        theirs = hf.with_defaults(read_settings(folder / CONFIG_FILE))
        texts = _hf_mismatches(model, theirs)
        if theirs["model_type"] == "gpt2":
            _check_tensors(folder, weights, theirs)
    problems = [Problem(what, str(folder), code="weights.config-mismatch") for what in texts]
    if problems:
        advice = "set these symbols to the values of the weights, or change INIT_FROM"
        problems[-1] = replace(problems[-1], next=advice)
    return problems


def _hf_mismatches(model: ModelConfig, theirs: Mapping[str, Any]) -> list[str]:
    """Return every mismatch between ``model`` and the settings of transformers' GPT-2."""
    activation, function = model.mlp.activation, theirs["activation_function"]
    settings = {
        "N_LAYER": str(theirs["n_layer"]),
        "N_HEAD": str(theirs["n_head"]),
        "N_EMBD": str(theirs["n_embd"]),
        "BLOCK_SIZE": str(theirs["n_positions"]),
        "TOKENIZER": f"{theirs['vocab_size']} tokens",
        "ACTIVATION": activation.name if function in activation.hf_names else function,
        "ATTENTION_PROJECTION": "dense",
        "POSITIONS": "learned",
        "NORM": "layernorm",
        "UNTIED_HEAD": _switch(not theirs["tie_word_embeddings"]),
        "MLP_HIDDEN": str(theirs["n_inner"]),
    }
    fixed = [
        f"{key}: unsupported (expected {supported}, got {theirs[key]})"
        for key, supported in hf.FIXED.items()
        if theirs[key] != supported
    ]
    return _differences(_settings(model), settings) + fixed


def _native_mismatches(model: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return every mismatch with the model of another run; parts can be added, but not dropped."""
    ours, settings = _settings(model), _settings(theirs)
    if theirs.attention.pattern.cost(theirs.shape, theirs.attention.projection).params:
        ours["ATTENTION_PATTERN"] = model.attention.pattern.name
        settings["ATTENTION_PATTERN"] = theirs.attention.pattern.name
    settings |= dict.fromkeys(sorted(_parts(theirs)), "on")
    return _differences(
        dict.fromkeys(settings, "off") | ours | dict.fromkeys(_parts(model), "on"), settings
    )


def _settings(model: ModelConfig) -> dict[str, str]:
    shape, attention = model.shape, model.attention
    return {
        "N_LAYER": str(shape.n_layer),
        "N_HEAD": str(shape.n_head),
        "N_EMBD": str(shape.n_embd),
        "BLOCK_SIZE": str(shape.block_size),
        "TOKENIZER": f"{shape.vocab_size} tokens",
        "ACTIVATION": model.mlp.activation.name,
        "ATTENTION_PROJECTION": attention.projection.name,
        "POSITIONS": attention.positions.name,
        "NORM": model.norm.name,
        "UNTIED_HEAD": _switch(model.untied_head),
        "MLP_HIDDEN": "/".join(map(str, model.hidden_widths())),
    }


def _switch(value: bool) -> str:
    return "y" if value else "n"


def _parts(model: ModelConfig) -> set[str]:
    """Return the symbols of the components of the kinds of which a model may have any number."""
    fields = (*vars(model.attention).values(), *vars(model.mlp).values())
    return {part.name.upper() for field in fields if isinstance(field, tuple) for part in field}


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [
        f"{symbol}: {ours[symbol]} does not match the weights ({value})"
        for symbol, value in theirs.items()
        if ours[symbol] != value
    ]


def _check_tensors(folder: Path, weights: Sequence[Path], theirs: Mapping[str, Any]) -> None:
    """Raise PreflightError unless the files have exactly the tensors described by config.json."""
    expected = hf.shapes(theirs)
    shapes, dtypes = dict[str, tuple[int, ...]](), set[str]()
    if hf.HEAD_NAME not in expected:
        # The head is tied to wte; most files omit it.
        expected[hf.HEAD_NAME] = shapes[hf.HEAD_NAME] = expected["wte.weight"]
    for path in weights:
        with opened_weights(path, "np") as opened:
            for key in opened.keys():  # noqa: SIM118 - safe_open is not iterable
                if name := hf.native_name(key):
                    header = opened.get_slice(key)
                    shapes[name] = tuple(header.get_shape())
                    dtypes.add(header.get_dtype())
    wrong = [
        f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    wrong += [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is unexpected" for name in shapes if name not in expected]
    wrong += [f"unsupported dtype {dtype}" for dtype in sorted(dtypes - _DTYPES)]
    if wrong:
        what = f"tensors do not match {CONFIG_FILE}: {first_of(wrong, 4)}"
        raise PreflightError(Problem(what, str(folder), code="weights.shape-mismatch"))
