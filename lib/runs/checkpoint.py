"""Checkpoints that are written atomically and verified by digests before they are loaded.

A checkpoint is a folder ``step-00000123`` with the weights (safetensors), all other state
(``state.pt``) and ``digests.json`` with the size and SHA-256 of both, written under a temporary name and
renamed. Digests are needed because a flipped byte loads without an error.
"""

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lib.errors import Problem, RunError
from lib.files import fsync_directory, link_error, sha256_file, temporary_path, write_json
from lib.json_files import RecordError
from lib.runs.lease import no_guard
from lib.runs.record import JsonRecord
from lib.runs.run_dir import CHECKPOINT_NAME

SCHEMA_VERSION = 1
_WEIGHTS = "model.safetensors"
STATE = "state.pt"
_DIGESTS = "digests.json"
_TEMPORARY = ".tmp-"
# Errors of torch.load and safetensors for files of another content.
_UNREADABLE = (
    *(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError),
    *(pickle.UnpicklingError, SafetensorError),
)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint, on the CPU."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
    guard: Callable[[], None] = no_guard,
) -> None:
    """Write the checkpoint of ``step`` and keep the newest ``keep``. Raises RunError and LeaseLost.

    Older ones are deleted only after the new one has been read back and matches its digests.
    """
    final = folder / CHECKPOINT_NAME.format(step)
    # The name of the process: another one may have taken over the run.
    temporary = folder / f"{_TEMPORARY}{temporary_path(final).name[1:]}"
    try:
        guard()
        if folder.is_symlink():
            raise link_error(folder)
        folder.mkdir(exist_ok=True)
        # Folders that a killed process left partially written or deleted.
        for leftover in folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        _write(temporary, step, weights, state)
        guard()
        _remove(final)
        os.rename(temporary, final)
        fsync_directory(folder)
    # torch.save converts an error of the disk to a RuntimeError without the cause.
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise _cannot_save(step, folder, str(cause)) from error
    if damage := _damage(final):
        raise _cannot_save(step, folder, f"verification failed: {damage}", "checkpoint.damaged")
    for old in _steps(folder)[keep:]:
        _remove(old)


def load_latest_checkpoint(
    folder: Path,
    warn: Callable[[str], None],
    mismatch: Callable[[Checkpoint], Problem | None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Return the newest checkpoint whose digests match.

    A damaged one is renamed to ``damaged-…`` and reported to ``warn``. ``mismatch`` returns the problem
    of a checkpoint that does not fit the run's other files: it is treated alike if an earlier one fits,
    else RunError is raised with the problem of the newest one.
    """
    mismatched: dict[Path, Problem] = {}
    for path in _steps(folder):
        loaded = _read(path)
        if isinstance(loaded, str):
            _skip(path, loaded, warn)
        elif problem := mismatch(loaded):
            mismatched[path] = problem
        else:
            for newer, reason in mismatched.items():
                _skip(newer, reason.located, warn)
            return loaded
    if mismatched:
        raise RunError(next(iter(mismatched.values())))
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint of a folder. Raises RunError if it is damaged."""
    loaded = _read(path)
    if isinstance(loaded, str):
        advice = "type: make prolong with another FROM="
        raise RunError(Problem(loaded, str(path), advice, code="checkpoint.damaged"))
    return loaded


def _read(path: Path) -> Checkpoint | str:
    """Return the checkpoint, or a description of its damage."""
    if damage := _damage(path):
        return damage
    try:
        step = JsonRecord.read(path / _DIGESTS).value(int, "step")
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return Checkpoint(step, safetensors.torch.load_file(path / _WEIGHTS), state)
    except (RecordError, *_UNREADABLE) as error:
        return f"right digests, but not a checkpoint: {error}".splitlines()[0]


def _skip(path: Path, damage: str, warn: Callable[[str], None]) -> None:
    aside = set_checkpoint_aside(path)
    warn(f"checkpoint {path.name} is damaged ({damage}), skipped and renamed to {aside.name}")


def set_checkpoint_aside(path: Path) -> Path:
    """Rename a checkpoint, so that the next start takes an earlier one; return the new path."""
    aside = path.with_name(f"damaged-{path.name}")
    _remove(aside)
    path.rename(aside)
    return aside


class _DigestedFile(io.BufferedWriter):
    """File that hashes the bytes as they are written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return super().write(data)

    def synced(self) -> dict[str, Any]:
        """Return length and digest of the file, which is on the disk then."""
        self.flush()
        os.fsync(self.fileno())
        return {"bytes": self.tell(), "sha256": self._hash.hexdigest()}


def _write(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    with _DigestedFile(folder / _WEIGHTS) as first, _DigestedFile(folder / STATE) as second:
        first.write(safetensors.torch.save(contiguous))
        torch.save(dict(state), second)
        digests = {_WEIGHTS: first.synced(), STATE: second.synced()}
    record = {"schema_version": SCHEMA_VERSION, "step": step, "files": digests}
    write_json(folder / _DIGESTS, record)


def _damage(path: Path) -> str:
    try:
        record = JsonRecord.read(path / _DIGESTS)
        digests = {name: record.value(str, "files", name, "sha256") for name in (_WEIGHTS, STATE)}
    except RecordError as error:
        return f"{_DIGESTS}: expected {error.expected}, got {error.actual}"
    for name, digest in digests.items():
        try:
            if sha256_file(path / name) != digest:
                return f"{name}: digest mismatch"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _steps(folder: Path) -> list[Path]:
    """Return complete checkpoints, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a crash never leaves a partial checkpoint."""
    if path.exists():
        temporary = path.with_name(f"{_TEMPORARY}old-{path.name}")
        os.rename(path, temporary)
        shutil.rmtree(temporary)


def _cannot_save(
    step: int, folder: Path, reason: str, code: str = "checkpoint.write-failed"
) -> RunError:
    what = f"cannot save the checkpoint of step {step}: {reason}"
    return RunError(Problem(what, str(folder), "free some space, then type: make", code=code))


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of names and bytes, sorted by name, for any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_digest(state: Any) -> str:
    """Return the SHA-256, in hex, of nested mappings and sequences of tensors, numbers and strings.

    Types, shapes and every bit count; the key order of mappings and the device do not.
    """
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add ``value`` to ``digest``, delimited by its length or a terminator."""
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        # A 0-d tensor cannot be viewed as bytes, a 1-d tensor can.
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    else:
        assert value is None or isinstance(value, bool | int | float | str), type(value)
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
