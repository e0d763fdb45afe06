"""Prepared data sets: their folder and manifest, verification, and memory-mapped access.

A data set is a folder. Its manifest ``dataset.json``, written last, lists every other file with
size and SHA-256, and has two digests: ``digest`` covers all that a run reads (tokens, documents,
tokenizer), ``seal`` covers the manifest. Its folder is named after a hash of the source that the
configuration selects.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.hub import HubCorpus
from gpt2.data.options import DataOptions
from gpt2.data.own_files import OwnText, TokenFiles
from gpt2.data.packages import PACKAGED, PackagedCorpus
from gpt2.data.shards import read_index
from gpt2.data.tokenizer import tokenizer_digest
from lib.errors import DataError, Problem
from lib.files import json_digest, sha256_file
from lib.json_files import RecordError, read_json_object

# Version of the preparation, part of every data set's hash. Increase it if the same source yields
# different tokens or another split.
_PREPARATION_VERSION = 2
MANIFEST = "dataset.json"


Corpus = PackagedCorpus | OwnText | TokenFiles | HubCorpus


def select_corpus(config: DataOptions, build_dir: Path) -> Corpus:
    """Return the source of ``config`` without reading its texts or querying the hub.

    Raises DataError if local files of the source are missing or invalid.
    """
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset != "custom":
        return HubCorpus.of(config, build_dir)
    if not config.custom_path:
        what = "CUSTOM_PATH: required for a custom data set, but empty"
        raise DataError(Problem(what, next="type: make menuconfig", code="config.missing-value"))
    path = build_dir / config.custom_path
    if config.custom_format == "bin":
        return TokenFiles.at(path)
    val_path = build_dir / config.custom_val_path if config.custom_val_path else None
    return OwnText.at(path, val_path, config.custom_format, config.custom_text_field)


def dataset_folder(config: DataOptions, build_dir: Path, corpus: Corpus | None = None) -> Path:
    """Return ``DATA_DIR/<dataset>-<tokenizer>-<hash8>``, with a hash of all that affects content.

    Your own files are read for it. Raises DataError like ``select_corpus``.
    """
    corpus = corpus or select_corpus(config, build_dir)
    unit = corpus.unit(config.val_fraction)
    identity: dict[str, Any] = {
        "preparation": _PREPARATION_VERSION,
        "source": [type(corpus).__name__, corpus.identity()],
        "tokenizer": tokenizer_digest(config.tokenizer),
        "val_fraction": None if unit in ("paths", "files") else config.val_fraction,
    }
    if unit == "piece":
        identity["unit"] = unit
    hash8 = json_digest(identity)[:8]
    return config.folder(build_dir) / f"{config.dataset}-{config.tokenizer}-{hash8}"


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Position of a document's tokens in its split, including the end-of-text token."""

    id: str
    offset: int
    length: int
    # SHA-256 of the text.
    digest: str


class TokenSplit:
    """One split of a data set: a single token sequence, stored in any number of shards."""

    def __init__(self, name: str, shards: Sequence[Path], index: Path | None) -> None:
        self.name = name
        self._paths = list(shards)
        self._index = index
        # Offset of each shard's first token, and of the end.
        sizes = [path.stat().st_size // 2 for path in self._paths]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the paths only, so that another process maps the files instead of copying them."""
        return {k: v for k, v in vars(self).items() if k not in ("_maps", "documents")}

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def documents(self) -> list[DocumentSpan] | None:
        """Return the documents in order, or None if unknown (token files)."""
        if self._index is None:
            return None
        lines = read_index(self._index)
        return [DocumentSpan(d["id"], d["offset"], d["length"], d["sha256"]) for d in lines]

    def window(self, offset: int, length: int) -> np.ndarray:
        """Return tokens ``offset`` to ``offset + length`` (uint16), as a view if possible.

        Before the first document, at offset -1, stands the end of text that ends the last one.
        """
        if offset == -1:
            return np.concatenate([self.window(self.n_tokens - 1, 1), self.window(0, length - 1)])
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
class PreparedDataset:
    """A verified data set."""

    train: TokenSplit
    val: TokenSplit
    # The content of dataset.json.
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    @property
    def unigram_entropy(self) -> float:
        """Return the loss of a model that predicts only unigram frequencies, in nats per token."""
        return float(self.manifest["unigram_entropy_nats"])


def open_dataset(config: DataOptions, build_dir: Path) -> PreparedDataset:
    """Open the data set of ``config``. Raises DataError if it is missing or damaged."""
    return open_folder(dataset_folder(config, build_dir))


def open_folder(folder: Path) -> PreparedDataset:
    """Open a prepared data set after verifying every byte of it."""
    manifest = checked_manifest(folder)
    splits = {}
    for name, split in manifest["splits"].items():
        index = folder / split["index"] if split["index"] else None
        splits[name] = TokenSplit(name, [folder / shard for shard in split["shards"]], index)
    return PreparedDataset(**splits, manifest=manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of ``folder``; raise DataError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        what = f"no prepared data set {folder.name}"
        raise DataError(Problem(what, str(folder), "type: make data", code="data.missing"))
    try:
        manifest = read_json_object(path)
    except RecordError as error:
        what = f"not a data set manifest: {error.problems[0].what}"
        raise _rebuild_error(folder, Problem(what, str(path), code="data.damaged")) from None
    if manifest.get("seal") != manifest_digest(manifest):
        what = "damaged: seal mismatch"
        raise _rebuild_error(folder, Problem(what, str(path), code="data.damaged"))
    return manifest


def checked_manifest(folder: Path, *, sizes_only: bool = False) -> dict[str, Any]:
    """Return the manifest of ``folder`` after checking its files.

    Compared are size and SHA-256 of each file, or only the size; other files are not allowed, unless
    they are hidden. The DataError lists all problems.
    """
    manifest = read_manifest(folder)
    problems = []

    def add(path: Path, what: str, code: str = "data.damaged") -> None:
        problems.append(Problem(what, str(path), code=code))

    for path in sorted(folder.iterdir()):
        if path.name not in (*manifest["files"], MANIFEST) and not path.name.startswith("."):
            what = f"file is not part of the data set (SHA-256 {sha256_file(path)})"
            add(path, what, "data.unexpected-file")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.exists():
            add(path, "missing", "data.missing")
        elif (size := path.stat().st_size) != expected["bytes"]:
            add(path, f"damaged: wrong size (expected {expected['bytes']} bytes, got {size})")
        elif not sizes_only and (digest := sha256_file(path)) != expected["sha256"]:
            expected_digest = expected["sha256"]
            add(path, f"damaged: SHA-256 mismatch (expected {expected_digest}, got {digest})")
    if problems:
        raise _rebuild_error(folder, *problems)
    return manifest


def content_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of all that a run reads: the tokenizer, each file's name and digest."""
    files = {name: file["sha256"] for name, file in manifest["files"].items()}
    return json_digest({"files": files, "tokenizer": manifest["tokenizer"]["digest"]})


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest without its seal."""
    return json_digest({key: value for key, value in manifest.items() if key != "seal"})


def _rebuild_error(folder: Path, *problems: Problem) -> DataError:
    """Build the error; its last problem gets the command to prepare the data set again."""
    remedy = f"type: rm -r {shlex.quote(str(folder))} && make data"
    return DataError(*problems[:-1], replace(problems[-1], next=remedy))
