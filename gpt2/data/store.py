"""Opening a prepared data set: everything is checked first, then memory-mapped.

A data set is a folder. ``dataset.json``, written last, names every other file with its size and
SHA-256. Two digests stand in it: ``digest`` covers what a run reads (tokens, documents, tokenizer),
``seal`` covers the manifest itself.
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import source
from gpt2.data.options import DataConfig
from gpt2.data.options import vocab_size as tokenizer_vocab_size
from gpt2.data.resume import CHECKPOINT
from gpt2.data.shards import read_index
from gpt2.data.tokenizer import digest as tokenizer_digest
from lib.errors import DataError, Problem
from lib.files import canonical_json, sha256

MANIFEST = "dataset.json"
# What the manifest does not list: itself, and what a kill may leave of the preparation.
_OWN = (MANIFEST, CHECKPOINT)
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Where a document's tokens lie in its split, its end of text included."""

    id: str
    offset: int
    length: int
    # SHA-256 of its text.
    digest: str


class Split:
    """One side of a data set: its tokens as one sequence, however many shards hold them."""

    def __init__(self, name: str, shards: Sequence[Path], index: Path | None) -> None:
        self.name = name
        self._paths = list(shards)
        self._index = index
        # Position of each shard's first token, and of the end.
        sizes = [path.stat().st_size // 2 for path in self._paths]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __getstate__(self) -> dict[str, Any]:
        """Paths only: another process maps the files again instead of receiving their content."""
        return {k: v for k, v in vars(self).items() if k not in ("_maps", "documents")}

    @property
    def n_tokens(self) -> int:
        """Tokens of this side."""
        return int(self._starts[-1])

    @cached_property
    def documents(self) -> list[DocumentSpan] | None:
        """The documents in order, or None where they are unknown (token files)."""
        if self._index is None:
            return None
        lines = read_index(self._index)
        return [DocumentSpan(d["id"], d["offset"], d["length"], d["sha256"]) for d in lines]

    def window(self, offset: int, length: int) -> np.ndarray:
        """Tokens ``offset`` to ``offset + length`` [length] (uint16). A view where it can be one."""
        end = offset + length
        assert 0 <= offset <= end <= self.n_tokens, (offset, length, self.n_tokens)
        shard = int(np.searchsorted(self._starts, offset, side="right")) - 1
        pieces = []
        while offset < end:
            start, stop = int(self._starts[shard]), min(end, int(self._starts[shard + 1]))
            pieces.append(self._maps[shard][offset - start : stop - start])
            offset, shard = stop, shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, "<u2")])

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        return [np.memmap(path, dtype="<u2", mode="r") for path in self._paths]


@dataclass(frozen=True)
class Dataset:
    """A checked data set."""

    train: Split
    val: Split
    # The content of dataset.json.
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Identity of the content: the tokenizer and the SHA-256 of every file (hex)."""
        return str(self.manifest["digest"])

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the training tokens' frequencies, in nats per token.

        A model that knows only how often each token occurs reaches this loss.
        """
        return float(self.manifest["unigram_entropy_nats"])


def open_dataset(config: DataConfig, build_dir: Path, vocab_size: int | None = None) -> Dataset:
    """The prepared data set of ``config``, every byte of it checked.

    ``vocab_size`` is what the model can take. Raises DataError when the data set is missing,
    damaged, made by another tokenizer, or too large in vocabulary.
    """
    folder = source.dataset_folder(config, build_dir)
    manifest = read_manifest(folder, config)
    tokens = tokenizer_vocab_size(config.tokenizer)
    if vocab_size is not None and vocab_size < tokens:
        raise DataError(
            Problem(
                f"the model's vocabulary of {vocab_size} is smaller than the {tokens} tokens of "
                f"{config.tokenizer}",
                next="type: make menuconfig, and choose the tokenizer that the model was made for",
            )
        )
    check_folder(folder, manifest)
    return Dataset(_split(folder, manifest, "train"), _split(folder, manifest, "val"), manifest)


def read_manifest(folder: Path, config: DataConfig) -> dict[str, Any]:
    """The manifest of ``folder``, its own digests and its tokenizer checked. Raises DataError."""
    path = folder / MANIFEST
    if not path.exists():
        what = f"no prepared data for {config.dataset} with the {config.tokenizer} tokenizer"
        raise DataError(Problem(what, str(folder), "type: make data"))
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["schema_version"]
        intact = manifest["seal"] == seal(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, Problem(f"not a manifest: {error}", str(path))) from None
    if version != SCHEMA_VERSION:
        what = f"schema version {version}; this program reads {SCHEMA_VERSION}"
        raise _damaged(folder, Problem(what, str(path)))
    if not intact:
        raise _damaged(folder, Problem("damaged: it does not match its own seal", str(path)))
    made_by = manifest["tokenizer"]
    expected = {"name": config.tokenizer, "digest": tokenizer_digest(config.tokenizer)}
    if {key: made_by[key] for key in expected} != expected:
        what = (
            f"made by the tokenizer {made_by['name']} ({made_by['digest'][:8]}); the configuration "
            f"says {config.tokenizer} ({expected['digest'][:8]})"
        )
        raise _damaged(folder, Problem(what, str(path)))
    return manifest


def check_folder(folder: Path, manifest: dict[str, Any], *, sizes_only: bool = False) -> None:
    """``check_files``, and that nothing else is there. DataError lists all problems."""
    problems = [
        Problem(
            f"not of this data set, which has no such file; SHA-256 is {sha256(path)}", str(path)
        )
        for path in sorted(folder.iterdir())
        if path.name not in (*manifest["files"], *_OWN) and not path.name.startswith(".")
    ]
    problems += _differing(folder, manifest, sizes_only)
    if problems:
        raise _damaged(folder, *problems)


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare the files of ``manifest`` with their size and SHA-256. DataError lists all that differ."""
    if problems := _differing(folder, manifest, sizes_only=False):
        raise _damaged(folder, *problems)


def _differing(folder: Path, manifest: dict[str, Any], sizes_only: bool) -> list[Problem]:
    problems = []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.exists():
            problems.append(Problem("missing", str(path)))
        elif (size := path.stat().st_size) != expected["bytes"]:
            what = f"damaged: {size} bytes, should be {expected['bytes']}"
            problems.append(Problem(what, str(path)))
        elif not sizes_only and (found := sha256(path)) != expected["sha256"]:
            what = f"damaged: SHA-256 is {found}, should be {expected['sha256']}"
            problems.append(Problem(what, str(path)))
    return problems


def content_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a run reads: the tokenizer, and each file's name and digest."""
    files = {name: file["sha256"] for name, file in manifest["files"].items()}
    content = {"files": files, "tokenizer": manifest["tokenizer"]["digest"]}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest without its seal."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def _split(folder: Path, manifest: dict[str, Any], name: str) -> Split:
    facts = manifest["splits"][name]
    index = folder / facts["index"] if facts["index"] else None
    return Split(name, [folder / shard for shard in facts["shards"]], index)


def _damaged(folder: Path, *problems: Problem) -> DataError:
    """The last problem says how to make the data set anew."""
    last = problems[-1]
    remedy = f"type: rm -r {shlex.quote(str(folder))} && make data"
    return DataError(*problems[:-1], Problem(last.what, last.where, remedy))
