"""A finished run as a folder for others: transformers' GPT-2 where it has one, else ours."""

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
    """Write the finished ``run`` to the folder ``target``, all of it or nothing.

    A model of transformers gets its config.json, model.safetensors and tokenizer; another one keeps
    our weights. resolved_config.yaml is beside either, so ``load_run`` takes both. ConfigError
    where ``target`` holds something else, PreflightError where the run's weights are not those that
    it wrote, DataError where the tokenizer's vocabulary is missing and cannot be fetched.
    """
    config = read_resolved_config(run)
    _check_weights(run)
    target = target.absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        if missing := without_form(config.model):
            say(
                "EXPORT",
                f"transformers' GPT-2 has no {', '.join(missing)}: our weights, as they are",
            )
            say("EXPORT", "to load them: from gpt2.weights.load import load_run")
            shutil.copyfile(run.weights, temporary / WEIGHTS)
        else:
            _write_hf(config, run, temporary, build_dir)
        shutil.copyfile(run.resolved_config, temporary / run.resolved_config.name)
        _put(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_hf(config: Config, run: RunDir, folder: Path, build_dir: Path) -> None:
    tokenizer = config.data.tokenizer
    theirs = config_json(config.model, _END_OF_TEXT[tokenizer])
    tensors = to_hf(safetensors.torch.load_file(run.weights), theirs)
    # transformers refuses a file that does not say who wrote it.
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, theirs)
    if tokenizer == "byte":
        say("EXPORT", "no tokenizer files: ids 0 to 255 are bytes of UTF-8, 256 ends a text")
    else:
        _write_tokenizer(config, folder, build_dir)


def _write_tokenizer(config: Config, folder: Path, build_dir: Path) -> None:
    """What AutoTokenizer reads, so that it needs no network."""
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
    """PreflightError unless the run's weights have the digest that its manifest tells."""
    try:
        written = json.loads(run.manifest.read_text())["artifacts"][run.weights.name]["sha256"]
        damaged = sha256(run.weights) != written
    except (OSError, ValueError, KeyError) as error:
        raise PreflightError(Problem(f"the run is not whole: {error}", str(run.path))) from None
    if damaged:
        advice = f"type: make rerun RUNS={run.path.name}"
        raise PreflightError(Problem("is not what the run wrote", str(run.weights), advice))


def _put(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, unless that holds the same already."""
    for path in temporary.iterdir():
        # The name says folder; a file's content is forced to the disk in the same way.
        sync_folder(path)
    if target.is_dir() and _digests(target) == _digests(temporary):
        say("EXPORT", f"{target} holds it already")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "exists, and holds something else"
        raise ConfigError(Problem(what, str(target), "remove it, or type: make export … TO=DIR"))
    os.rename(temporary, target)
    sync_folder(target.parent)
    say("EXPORT", f"{len(_digests(target))} files in {target}")


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p) if p.is_file() else "a folder" for p in folder.iterdir()}
