"""Conversion between transformers' GPT-2 weights and the native model."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data import store as data_source
from gpt2.data.corpus import download_wheels
from gpt2.data.tokenizer import (
    ByteTokenizer,
    Gpt2Tokenizer,
    read_merges,
    tokenizer_packages,
    vocabulary_strings,
)
from gpt2.model import GPT
from gpt2.records.run_files import read_resolved_config
from gpt2.weights import hf, source
from gpt2.weights.hf import config_json, unsupported_components
from gpt2.weights.source import CONFIG_FILE, WEIGHTS_FILE
from lib.console import log
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import fsync_directory, sha256_file, write_atomic, write_json
from lib.json_files import RecordError
from lib.runs.record import read_manifest
from lib.runs.run_dir import RunDir

_MECHANISM = re.compile(r"\.(?:terms|gates|mechanisms)\.(\w+)\.")
_MAX_NAMES_SHOWN = 4


def load_initial_weights(
    model: GPT, config: Config, build_dir: Path, tell: Callable[[str, str], None]
) -> dict[str, str]:
    """Load the weights of ``INIT_FROM`` into ``model``; do nothing if ``INIT_FROM`` is empty.

    Parameters of mechanisms that GPT-2 lacks keep their initial values, and one line that names the
    mechanisms is passed to ``tell``. Returns path → SHA-256 of the files read. Raises ConfigError
    with every mismatch, PreflightError if files are missing or damaged; ``model`` is then
    unchanged.
    """
    if not config.init.init_from:
        return {}
    folder = source.weights_folder(config, build_dir)
    if problems := source.weight_mismatches(folder, config.model):
        raise ConfigError(*problems)
    digests = {str(path.absolute()): sha256_file(path) for path in source.weight_files(folder)}
    missing = copy_weights(model, read_tensors(folder))
    names = sorted({_MECHANISM.findall(name)[0] for name in missing})
    rest = f"; randomly initialized: {len(missing)} tensors of {', '.join(names)}" if names else ""
    tell("INIT", f"{config.init.init_from}: loaded all weights of {folder}{rest}")
    return digests


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder by native name, in transformers' layout.

    The result may contain ``lm_head``.
    """
    _, *weights = source.weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in weights:
        for key, tensor in safetensors.torch.load_file(path).items():
            if name := hf.native_name(key):
                tensors[name] = tensor
    return tensors


@torch.no_grad()
def copy_weights(model: GPT, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy ``tensors`` (transformers' layout) into ``model``; return the parameters not in them.

    Padding rows of ``wte`` become zero. Raises ConfigError if there are non-zero biases and the
    model has none, PreflightError if the head is not tied; ``model`` is then unchanged.
    """
    parameters = dict(model.named_parameters())
    head = tensors.get(hf.HEAD_NAME)
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise PreflightError(
            Problem(
                f"{hf.HEAD_NAME} differs from wte.weight (expected a tied head)",
                code="weights.untied-head",
            )
        )
    unused = sorted(tensors.keys() - parameters.keys() - {hf.HEAD_NAME})
    if biases := [name for name in unused if tensors[name].any()]:
        more = (
            f" and {len(biases) - _MAX_NAMES_SHOWN} more" if len(biases) > _MAX_NAMES_SHOWN else ""
        )
        what = f"BIAS: the weights have biases: {', '.join(biases[:_MAX_NAMES_SHOWN])}{more}"
        raise ConfigError(Problem(what, next="set BIAS=y", code="weights.config-mismatch"))
    parameters["wte.weight"][model.config.shape.vocab_size :] = 0
    for name in parameters.keys() & tensors.keys():
        value = hf.convert_layout(name, tensors[name])
        parameters[name][: len(value)].copy_(value)
    return sorted(parameters.keys() - tensors.keys())


def to_hf(weights: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert native weights to the GPT-2 described by ``theirs``, without the tied head.

    Padding rows of ``wte`` are removed. Biases that the model lacks become zeros: the function is
    the same.
    """
    tensors = {name: hf.convert_layout(name, tensor) for name, tensor in weights.items()}
    tensors["wte.weight"] = tensors["wte.weight"][: theirs["vocab_size"]]
    for name, shape in hf.shapes(theirs).items():
        tensors.setdefault(name, tensors["wte.weight"].new_zeros(shape))
    return {hf.PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}


# Export of a finished run as a transformers GPT-2 folder, or else in the native format.


_END_OF_TEXT = {"byte": ByteTokenizer.end_of_text, "gpt2": Gpt2Tokenizer.end_of_text}


def export(run: RunDir, target: Path, build_dir: Path) -> None:
    """Export the finished ``run`` to the folder ``target``, atomically.

    A model supported by transformers gets config.json, model.safetensors and a tokenizer; any other
    model is exported with native weights. Both contain resolved_config.yaml, so ``load_run`` loads
    either. Raises ConfigError if ``target`` has other content, PreflightError if the weights do not
    match their recorded digest, DataError if the vocabulary of the tokenizer is missing and cannot
    be downloaded.
    """
    config = read_resolved_config(run)
    _check_weights(run)
    target = target.absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        if unsupported := unsupported_components(config.model):
            log(
                "EXPORT",
                f"not supported by transformers' GPT-2: {', '.join(unsupported)}; "
                "exporting native weights",
            )
            log("EXPORT", "load them with: from gpt2.weights.trained import load_run")
            shutil.copyfile(run.weights, temporary / WEIGHTS_FILE)
        else:
            _write_hf(config, run, temporary, build_dir)
        shutil.copyfile(run.resolved_config, temporary / run.resolved_config.name)
        _put(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_hf(config: Config, run: RunDir, folder: Path, build_dir: Path) -> None:
    tokenizer = config.data.tokenizer
    hf_config = config_json(config.model, _END_OF_TEXT[tokenizer])
    tensors = to_hf(safetensors.torch.load_file(run.weights), hf_config)
    # transformers requires the format in the metadata of the file.
    write_atomic(folder / WEIGHTS_FILE, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, hf_config)
    if tokenizer == "byte":
        log("EXPORT", "no tokenizer files: ids 0 to 255 are UTF-8 bytes, 256 is end of text")
    else:
        _write_tokenizer(config, folder, build_dir)


def _write_tokenizer(config: Config, folder: Path, build_dir: Path) -> None:
    """Write the files that AutoTokenizer needs to work offline."""
    downloads = data_source.downloads_folder(config.data, build_dir)
    download_wheels(tokenizer_packages(config.data.tokenizer), downloads)
    merges = read_merges(downloads)
    vocabulary = vocabulary_strings(merges)
    end = vocabulary[-1]
    write_json(folder / "vocab.json", {token: i for i, token in enumerate(vocabulary)})
    write_atomic(folder / "merges.txt", merges)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": config.model.shape.block_size,
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
    }
    write_json(folder / "tokenizer_config.json", settings)


def _check_weights(run: RunDir) -> None:
    """Raise PreflightError if the weights do not match the digest in the manifest."""
    try:
        recorded = read_manifest(run).artifact_digest(run.weights)
        damaged = sha256_file(run.weights) != recorded
    except (RecordError, OSError) as error:
        what = f"the run is incomplete: {error}"
        raise PreflightError(Problem(what, str(run.path), code="run.incomplete")) from None
    if damaged:
        raise PreflightError(
            Problem(
                "digest differs from the manifest",
                str(run.weights),
                f"type: make rerun RUNS={run.path.name}",
                code="weights.damaged",
            )
        )


def _put(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target`` unless ``target`` has the same content already."""
    for path in temporary.iterdir():
        # Despite its name, sync_folder also flushes the content of a file to disk.
        fsync_directory(path)
    if target.is_dir() and _digests(target) == _digests(temporary):
        log("EXPORT", f"{target} is up to date")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            Problem(
                "exists with different content",
                str(target),
                "remove it, or type: make export … OUT=DIR",
                code="export.target-exists",
            )
        )
    os.rename(temporary, target)
    fsync_directory(target.parent)
    log("EXPORT", f"wrote {len(_digests(target))} files to {target}")


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: sha256_file(p) if p.is_file() else "a folder" for p in folder.iterdir()}
