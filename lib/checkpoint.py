"""Checkpoints that are whole or not there, and that are checked before they are believed.

A checkpoint is a folder ``step-00000123`` with the weights (safetensors), all other state
(``state.pt``) and, written last, ``digests.json`` with the size and SHA-256 of both. The folder is
written under a temporary name and renamed: a crash leaves the older checkpoints and a leftover that
the next save removes. A flipped byte would load without an error, hence the digests.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lib.errors import Problem, RunError
from lib.files import sha256, sync_folder, write_json

SCHEMA_VERSION = 1
_WEIGHTS = "model.safetensors"
_STATE = "state.pt"
_DIGESTS = "digests.json"
_NAME = "step-{:08d}"
_TEMPORARY = ".tmp-"
# Folder, zip directory and digests, beside the tensors themselves.
_SPACE_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, on the CPU."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]


def save(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], keep: int
) -> None:
    """Write the checkpoint of ``step`` below ``folder``; keep the newest ``keep``.

    Older ones are deleted only after the new one has been read back and agrees with its digests.
    RunError when the disk is full or cannot be written; the older checkpoints are then untouched.
    """
    final = folder / _NAME.format(step)
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        folder.mkdir(exist_ok=True)
        _clean(folder)
        _check_space(folder, step, (*weights.values(), *tensors_in(state)))
        temporary.mkdir()
        _write(temporary, step, weights, state)
        _remove(final)
        os.rename(temporary, final)
        sync_folder(folder)
    # torch.save turns an error of the disk into a RuntimeError.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _cannot_save(step, folder, str(error)) from error
    if damage := _damage(final):
        raise _cannot_save(step, folder, f"read back, {damage}")
    for old in _steps(folder)[keep:]:
        _remove(old)


def load_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose digests agree, or None when there is none.

    A damaged one is renamed to ``damaged-…`` and named to ``warn``; the one before it is taken.
    """
    for path in _steps(folder):
        damage = _damage(path)
        if not damage:
            return _load(path)
        aside = path.with_name(f"damaged-{path.name}")
        _remove(aside)
        path.rename(aside)
        warn(f"checkpoint {path.name} is damaged ({damage}) and is not used; kept as {aside.name}")
    return None


def delete_all(folder: Path) -> None:
    """Remove every checkpoint: the final weights have made them useless."""
    shutil.rmtree(folder, ignore_errors=True)


class _DigestedFile:
    """What ``torch.save`` writes to: hashes the bytes as they are handed over."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def facts(self) -> dict[str, Any]:
        """Size and digest of what was written."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def _write(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    files = {
        _WEIGHTS: _write_file(
            folder / _WEIGHTS, lambda out: out.write(safetensors.torch.save(contiguous))
        ),
        _STATE: _write_file(folder / _STATE, lambda out: torch.save(dict(state), out)),
    }
    record = {"schema_version": SCHEMA_VERSION, "step": step, "files": files}
    write_json(folder / _DIGESTS, record)


def _write_file(path: Path, produce: Callable[[_DigestedFile], Any]) -> dict[str, Any]:
    with open(path, "wb") as stream:
        digested = _DigestedFile(stream)
        produce(digested)
        stream.flush()
        os.fsync(stream.fileno())
    return digested.facts()


def _load(path: Path) -> Checkpoint:
    record = json.loads((path / _DIGESTS).read_text())
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    return Checkpoint(record["step"], safetensors.torch.load_file(path / _WEIGHTS), state)


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; empty when its files agree with their digests."""
    try:
        record = json.loads((path / _DIGESTS).read_text())
        files = [(name, record["files"][name]["sha256"]) for name in (_WEIGHTS, _STATE)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_DIGESTS}: {error}"
    for name, digest in files:
        try:
            if sha256(path / name) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _steps(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first; the number is padded, so names sort by step."""
    return sorted(folder.glob("step-*"), reverse=True)


def _clean(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a crash never leaves half of one behind."""
    if path.exists():
        doomed = path.with_name(f"{_TEMPORARY}old-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _check_space(folder: Path, step: int, tensors: tuple[Tensor, ...]) -> None:
    needed = sum(t.numel() * t.element_size() for t in tensors) + _SPACE_MARGIN_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"it needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free"
        raise _cannot_save(step, folder, reason)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _cannot_save(step: int, folder: Path, reason: str) -> RunError:
    what = f"cannot save the checkpoint of step {step}: {reason}"
    return RunError(Problem(what, str(folder), "free some space, then type: make"))
