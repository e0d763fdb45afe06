"""Weights between files, the native model, and transformers' GPT-2."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.lora import merged_weights, store_base
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from gpt2.records.files import read_resolved_config
from gpt2.weights import hf, source
from gpt2.weights.match import weight_mismatches
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256_file
from lib.runs.checkpoint import STATE, read_checkpoint
from lib.runs.run_dir import RunDir
from lib.units import first_of

# The mechanism of a parameter, or else its last module.
_PART = re.compile(r"(?m)(?:.*\.(?:terms|gates|mechanisms)\.(\w+)\..*$|(?:.*\.)?(\w+)\.\w+$)")


def load_initial_weights(
    model: GPT, config: Config, build_dir: Path, write: Callable[[str, str], None]
) -> dict[str, str]:
    """Load the weights of ``INIT_FROM``, if any, into ``model``; return path → SHA-256 of the files.

    Parameters of mechanisms that the weights lack keep their initial values; ``write`` receives one
    line that names them. Raises ConfigError with every mismatch, PreflightError if files are missing
    or damaged; ``model`` is then unchanged.
    """
    if not config.init.init_from:
        return {}
    folder = source.weights_folder(config, build_dir)
    if problems := weight_mismatches(folder, config.model):
        raise ConfigError(*problems)
    files = source.weight_files(folder)
    if config.init.iteration is not None:
        # Verified with the weights; the optimizer continues from it.
        read_checkpoint(folder)
        files.append(folder / STATE)
    elif config.init.is_run:
        source.require_recorded_weights(RunDir(folder))
    digests = {str(path.absolute()): sha256_file(path) for path in files}
    missing = copy_weights(model, merged_tensors(folder))
    if config.model.adapters:
        missing = [name for name in missing if ".adapter." not in name]
    names = sorted({a or b for a, b in _PART.findall("\n".join(missing))})
    if config.model.adapters and missing:
        what = f"LORA: y, but {config.init.init_from} has no {', '.join(names)} (random and frozen)"
        advice = "train the whole model first: type: SET=LORA=n"
        raise ConfigError(Problem(what, next=advice, code="weights.config-mismatch"))
    rest = f"; randomly initialized: {len(missing)} tensors of {', '.join(names)}" if names else ""
    write("INIT", f"{config.init.init_from}: loaded all weights of {folder}{rest}")
    return digests


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder by native name, in the native layout; perhaps a head."""
    _, *paths = source.weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with source.opened_weights(path, "pt") as opened:
            names = {key: hf.native_name(key) for key in opened.keys()}  # noqa: SIM118
            tensors |= {name: opened.get_tensor(key) for key, name in names.items() if name}
    if source.is_native(folder):
        return tensors
    return {name: hf.convert_layout(name, tensor) for name, tensor in tensors.items()}


def merged_tensors(folder: Path) -> dict[str, Tensor]:
    """Return ``read_tensors`` of a folder; of a run with adapters, with these merged."""
    tensors = read_tensors(folder)
    if (folder / source.CONFIG_FILE).exists():
        return tensors
    options = read_resolved_config(source.run_of(folder)).model
    return merged_weights(model_of(options, tensors)[0]) if options.adapters else tensors


def model_of(options: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[GPT, list[str]]:
    """Return a model with ``tensors``, and the parameters not in them; raises as ``copy_weights``."""
    model = GPT(options)
    store_base(model, options.adapters)
    return model, copy_weights(model, tensors)


@torch.no_grad()
def copy_weights(model: GPT, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy ``tensors`` into ``model``; return the parameters not in them. Padding rows become zero.

    Raises ConfigError if there are non-zero biases and the model has none, PreflightError if the head
    differs from that of a model that ties it or a tensor has another shape; ``model`` is then unchanged.
    """
    parameters = dict(model.named_parameters())
    head = None if hf.HEAD_NAME in parameters else tensors.get(hf.HEAD_NAME)
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        what = f"{hf.HEAD_NAME} differs from wte.weight (expected a tied head)"
        raise PreflightError(Problem(what, code="weights.untied-head"))
    unused = sorted(tensors.keys() - parameters.keys() - {hf.HEAD_NAME})
    if unused := [name for name in unused if tensors[name].any()]:
        if not all(name.endswith(".bias") for name in unused):
            what = f"the model has no {first_of(unused)}"
            raise PreflightError(Problem(what, "INIT_FROM", code="weights.shape-mismatch"))
        what = f"BIAS: the weights have biases: {first_of(unused)}"
        raise ConfigError(Problem(what, next="set BIAS=y", code="weights.config-mismatch"))
    vocab_size = model.config.shape.vocab_size
    pairs = []
    for name in parameters.keys() & tensors.keys():
        value, rows = tensors[name], parameters[name].data
        if name in hf.PER_TOKEN:
            value, rows = value[:vocab_size], rows[:vocab_size]
        if rows.shape != value.shape:
            what = f"{name} has shape {list(value.shape)} (expected {list(rows.shape)})"
            raise PreflightError(Problem(what, "INIT_FROM", code="weights.shape-mismatch"))
        pairs.append((rows, value))
    for name in parameters.keys() & tensors.keys() & {*hf.PER_TOKEN}:
        parameters[name][vocab_size:] = 0
    for rows, value in pairs:
        rows.copy_(value)
    return sorted(parameters.keys() - tensors.keys())


def to_hf(weights: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert native weights to the GPT-2 described by ``theirs``: without padding, with biases."""
    tensors = {name: hf.convert_layout(name, tensor) for name, tensor in weights.items()}
    for name in tensors.keys() & {*hf.PER_TOKEN}:
        tensors[name] = tensors[name][: theirs["vocab_size"]]
    for name, shape in hf.shapes(theirs).items():
        tensors.setdefault(name, tensors["wte.weight"].new_zeros(shape))
    return {hf.their_name(name): tensor.contiguous() for name, tensor in tensors.items()}
