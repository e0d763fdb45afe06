"""Export of a finished run as a transformers GPT-2 folder, or else in the native format."""

import json
import os
import shutil
from pathlib import Path

import safetensors.torch

from gpt2.config import Config
from gpt2.data import source as data_source
from gpt2.data.packages import fetch
from gpt2.data.tokenizer import (
    ByteTokenizer,
    Gpt2Tokenizer,
    packages,
    read_merges,
    spelled_vocabulary,
)
from gpt2.runs import read_resolved_config
from gpt2.weights.hf import to_hf
from gpt2.weights.layout import config_json, without_form
from gpt2.weights.source import CONFIG, WEIGHTS
from lib.console import say
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256, sync_folder, write_atomic, write_json
from lib.rundir import RunDir

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
        if unsupported := without_form(config.model):
            say(
                "EXPORT",
                f"not supported by transformers' GPT-2: {', '.join(unsupported)}; "
                "exporting native weights",
            )
            say("EXPORT", "load them with: from gpt2.weights.load import load_run")
            shutil.copyfile(run.weights, temporary / WEIGHTS)
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
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, hf_config)
    if tokenizer == "byte":
        say("EXPORT", "no tokenizer files: ids 0 to 255 are UTF-8 bytes, 256 is end of text")
    else:
        _write_tokenizer(config, folder, build_dir)


def _write_tokenizer(config: Config, folder: Path, build_dir: Path) -> None:
    """Write the files that AutoTokenizer needs to work offline."""
    downloads = data_source.downloads_folder(config.data, build_dir)
    fetch(packages(config.data.tokenizer), downloads)
    merges = read_merges(downloads)
    vocabulary = spelled_vocabulary(merges)
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
        recorded = json.loads(run.manifest.read_text())["artifacts"][run.weights.name]["sha256"]
        damaged = sha256(run.weights) != recorded
    except (OSError, ValueError, KeyError) as error:
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
        sync_folder(path)
    if target.is_dir() and _digests(target) == _digests(temporary):
        say("EXPORT", f"{target} is up to date")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            Problem(
                "exists with different content",
                str(target),
                "remove it, or type: make export … TO=DIR",
                code="export.target-exists",
            )
        )
    os.rename(temporary, target)
    sync_folder(target.parent)
    say("EXPORT", f"wrote {len(_digests(target))} files to {target}")


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p) if p.is_file() else "a folder" for p in folder.iterdir()}
