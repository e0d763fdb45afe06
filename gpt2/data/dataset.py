"""Prepared data sets: their folder and manifest, verification, and memory-mapped access.

A data set is a folder. Its manifest ``dataset.json``, written last, lists every other file with
size and SHA-256, and has two digests: ``digest`` covers all that a run reads (tokens, documents,
tokenizer), ``seal`` covers the manifest. Its folder is named after a hash of the source that the
configuration selects.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.corpus import Corpus, select_corpus, split_unit
from gpt2.data.options import DataOptions
from gpt2.data.options import vocab_size as tokenizer_vocab_size
from gpt2.data.shards import read_index
from gpt2.data.tokenizer import tokenizer_digest
from lib.errors import DataError, Problem
from lib.files import json_digest, sha256_file
from lib.json_files import RecordError, read_json_object

# Version of the preparation, part of every data set's hash. Increase it if the same source yields
# different tokens or another split.
_PREPARATION_VERSION = 2
MANIFEST = "dataset.json"


def data_folder(config: DataOptions, build_dir: Path) -> Path:
    """Return DATA_DIR; a relative path is relative to ``build_dir``, ``~`` is the home folder."""
    return build_dir / os.path.expanduser(config.data_dir)


def dataset_folder(config: DataOptions, build_dir: Path, corpus: Corpus | None = None) -> Path:
    """Return ``DATA_DIR/<dataset>-<tokenizer>-<hash8>``, with a hash of all that affects content.

    Your own files are read for it. Raises DataError like ``select_corpus``.
    """
    corpus = corpus or select_corpus(config, build_dir)
    unit = split_unit(corpus, config.val_fraction)
    identity: dict[str, Any] = {
        "preparation": _PREPARATION_VERSION,
        "source": [type(corpus).__name__, corpus.identity()],
        "tokenizer": tokenizer_digest(config.tokenizer),
        "val_fraction": None if unit in ("paths", "files") else config.val_fraction,
    }
    if unit == "piece":
        identity["unit"] = unit
    hash8 = json_digest(identity)[:8]
    return data_folder(config, build_dir) / f"{config.dataset}-{config.tokenizer}-{hash8}"


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
        """Return the digest of the content: the tokenizer and the SHA-256 of every file (hex)."""
        return str(self.manifest["digest"])

    @property
    def unigram_entropy(self) -> float:
        """Return the entropy of the training tokens' frequencies, in nats per token.

        This is the loss of a model that predicts only unigram frequencies.
        """
        return float(self.manifest["unigram_entropy_nats"])


def open_dataset(
    config: DataOptions, build_dir: Path, vocab_size: int | None = None
) -> PreparedDataset:
    """Open the prepared data set of ``config`` after verifying every byte of it.

    ``vocab_size`` is the model's vocabulary size. Raises DataError if the data set is missing or
    damaged, or needs a larger vocabulary.
    """
    folder = dataset_folder(config, build_dir)
    tokens = tokenizer_vocab_size(config.tokenizer)
    if vocab_size is not None and vocab_size < tokens:
        what = (
            f"the model's vocabulary is too small for the tokenizer {config.tokenizer} "
            f"(expected at least {tokens} tokens, got {vocab_size})"
        )
        advice = "type: make menuconfig, and choose the model's tokenizer"
        raise DataError(Problem(what, next=advice, code="data.vocabulary-too-large"))
    manifest = checked_manifest(folder)
    train, val = (_split(folder, manifest, name) for name in ("train", "val"))
    return PreparedDataset(train, val, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of ``folder`` and check its seal.

    Raises DataError if the manifest is missing or damaged.
    """
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
    problems = [
        Problem(
            f"file is not part of the data set (SHA-256 {sha256_file(path)})",
            str(path),
            code="data.unexpected-file",
        )
        for path in sorted(folder.iterdir())
        if path.name not in (*manifest["files"], MANIFEST) and not path.name.startswith(".")
    ]
    _require_files(folder, manifest["files"], sizes_only, problems)
    return manifest


def open_split(folder: Path, manifest: dict[str, Any], name: str) -> TokenSplit:
    """Open one split after verifying every byte of it.

    Raises DataError listing every missing or damaged file.
    """
    split = manifest["splits"][name]
    names = [*split["shards"], *filter(None, [split["index"]])]
    _require_files(folder, {file: manifest["files"][file] for file in names})
    return _split(folder, manifest, name)


def _require_files(
    folder: Path,
    files: Mapping[str, dict[str, Any]],
    sizes_only: bool = False,
    problems: Sequence[Problem] = (),
) -> None:
    """Raise DataError with ``problems`` and those of ``files``, if there are any."""
    problems = list(problems)
    for name, expected in files.items():
        path = folder / name
        if not path.exists():
            problems.append(Problem("missing", str(path), code="data.missing"))
        elif (size := path.stat().st_size) != expected["bytes"]:
            what = f"damaged: wrong size (expected {expected['bytes']} bytes, got {size})"
            problems.append(Problem(what, str(path), code="data.damaged"))
        elif not sizes_only and (digest := sha256_file(path)) != expected["sha256"]:
            what = f"damaged: SHA-256 mismatch (expected {expected['sha256']}, got {digest})"
            problems.append(Problem(what, str(path), code="data.damaged"))
    if problems:
        raise _rebuild_error(folder, *problems)


def content_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of all that a run reads: the tokenizer, each file's name and digest."""
    files = {name: file["sha256"] for name, file in manifest["files"].items()}
    content = {"files": files, "tokenizer": manifest["tokenizer"]["digest"]}
    return json_digest(content)


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest without its seal."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return json_digest(rest)


def _split(folder: Path, manifest: dict[str, Any], name: str) -> TokenSplit:
    split = manifest["splits"][name]
    index = folder / split["index"] if split["index"] else None
    return TokenSplit(name, [folder / shard for shard in split["shards"]], index)


def _rebuild_error(folder: Path, *problems: Problem) -> DataError:
    """Build the error; its last problem gets the command to prepare the data set again."""
    remedy = f"type: rm -r {shlex.quote(str(folder))} && make data"
    return DataError(*problems[:-1], replace(problems[-1], next=remedy))
