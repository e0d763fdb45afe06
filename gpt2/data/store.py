"""Prepared data sets: text source, verification, memory-mapped access and evaluation windows.

A data set is a folder. Its manifest ``dataset.json``, written last, lists every other file with
size and SHA-256, and has two digests: ``digest`` covers all that a run reads (tokens, documents,
tokenizer), ``seal`` covers the manifest. Its folder is named after a hash of the text source that
the configuration selects. Every evaluation reads the same fixed list of windows.
"""

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import corpus, hub
from gpt2.data.corpus import PACKAGED, DocumentSource
from gpt2.data.options import DataOptions
from gpt2.data.options import vocab_size as tokenizer_vocab_size
from gpt2.data.shards import CHECKPOINT, read_index
from gpt2.data.tokenizer import tokenizer_digest
from lib.errors import ConfigError, DataError, Problem
from lib.files import canonical_json, sha256_file
from lib.json_files import RecordError, read_json_object

# Version of the preparation, part of every data set's hash. Increase it if the same source yields
# different tokens or another split.
PREPARATION_VERSION = 2

# Source of documents or, for BinCorpus, of tokens.
TextSource = DocumentSource | corpus.BinCorpus | hub.HubCorpus


def has_explicit_split(source: TextSource) -> bool:
    """Return whether the source defines the split; otherwise the hash of each text does."""
    return isinstance(source, corpus.BinCorpus) or bool(
        isinstance(source, corpus.CustomFiles) and source.held_out
    )


def data_folder(config: DataOptions, build_dir: Path) -> Path:
    """Return DATA_DIR; a relative path is relative to ``build_dir``, ``~`` is the home folder."""
    return build_dir / os.path.expanduser(config.data_dir)


def downloads_folder(config: DataOptions, build_dir: Path) -> Path:
    """Return the folder of downloaded wheels."""
    return data_folder(config, build_dir) / "downloads"


def select_source(config: DataOptions, build_dir: Path) -> TextSource:
    """Return the text source of ``config`` without querying the hub.

    Raises DataError if local files of the source are missing or invalid.
    """
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset == "custom":
        if not config.custom_path:
            raise DataError(
                Problem(
                    "CUSTOM_PATH: required for a custom data set, but empty",
                    next="type: make menuconfig",
                    code="config.missing-value",
                )
            )
        path = build_dir / config.custom_path
        val_path = build_dir / config.custom_val_path if config.custom_val_path else None
        return corpus.find_custom_corpus(
            path, config.custom_format, config.custom_text_field, val_path
        )
    return hub.find_hub_corpus(config, build_dir)


def dataset_folder(config: DataOptions, build_dir: Path) -> Path:
    """Return ``DATA_DIR/<dataset>-<tokenizer>-<hash8>``, with a hash of all that affects content.

    Hashed are the source's digests, the tokenizer, the split and the preparation version; a custom
    source is read to compute them. Raises DataError like ``select_source``.
    """
    return folder_for_source(select_source(config, build_dir), config, build_dir)


def folder_for_source(corpus: TextSource, config: DataOptions, build_dir: Path) -> Path:
    """Return ``dataset_folder`` for a source that is already resolved."""
    identity = {
        "preparation": PREPARATION_VERSION,
        # The name of the class is hashed: another one would make a new folder of the same data.
        "source": [type(corpus).__name__, corpus.identity()],
        "tokenizer": tokenizer_digest(config.tokenizer),
        "val_fraction": None if has_explicit_split(corpus) else config.val_fraction,
    }
    hash8 = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:8]
    return data_folder(config, build_dir) / f"{config.dataset}-{config.tokenizer}-{hash8}"


MANIFEST = "dataset.json"
# Files that the manifest does not list: the manifest, and the leftover of a killed preparation.
_UNLISTED = (MANIFEST, CHECKPOINT)
SCHEMA_VERSION = 2


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
        """Return the number of tokens of the split."""
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

    ``vocab_size`` is the model's vocabulary size. Raises DataError if the data set is missing,
    damaged, prepared with another tokenizer, or needs a larger vocabulary.
    """
    folder = dataset_folder(config, build_dir)
    manifest = read_manifest(folder, config)
    tokens = tokenizer_vocab_size(config.tokenizer)
    if vocab_size is not None and vocab_size < tokens:
        raise DataError(
            Problem(
                f"the model's vocabulary is too small for the tokenizer {config.tokenizer} "
                f"(expected at least {tokens} tokens, got {vocab_size})",
                next="type: make menuconfig, and choose the model's tokenizer",
                code="data.vocabulary-too-large",
            )
        )
    check_dataset(folder, manifest)
    return PreparedDataset(
        _split(folder, manifest, "train"), _split(folder, manifest, "val"), manifest
    )


def read_manifest(folder: Path, config: DataOptions) -> dict[str, Any]:
    """Read the manifest of ``folder`` and check its schema, seal and tokenizer.

    Raises DataError if the manifest is missing, damaged, or of another tokenizer.
    """
    path = folder / MANIFEST
    if not path.exists():
        what = f"no prepared data for {config.dataset} with the {config.tokenizer} tokenizer"
        raise DataError(Problem(what, str(folder), "type: make data", code="data.missing"))
    try:
        manifest = read_json_object(path)
        version = manifest["schema_version"]
        intact = manifest["seal"] == manifest_digest(manifest)
    except (RecordError, ValueError, KeyError, TypeError) as error:
        reason = error.problems[0].what if isinstance(error, RecordError) else error
        what = f"not a data set manifest: {reason}"
        raise _rebuild_error(folder, Problem(what, str(path), code="data.damaged")) from None
    if version != SCHEMA_VERSION:
        what = f"unsupported schema version (expected {SCHEMA_VERSION}, got {version})"
        raise _rebuild_error(folder, Problem(what, str(path), code="data.unsupported-version"))
    if not intact:
        what = "damaged: seal mismatch"
        raise _rebuild_error(folder, Problem(what, str(path), code="data.damaged"))
    recorded = manifest["tokenizer"]
    expected = {"name": config.tokenizer, "digest": tokenizer_digest(config.tokenizer)}
    if {key: recorded[key] for key in expected} != expected:
        what = (
            f"wrong tokenizer (expected {config.tokenizer} {expected['digest'][:8]}, "
            f"got {recorded['name']} {recorded['digest'][:8]})"
        )
        raise _rebuild_error(folder, Problem(what, str(path), code="data.tokenizer-mismatch"))
    return manifest


def check_dataset(folder: Path, manifest: dict[str, Any], *, sizes_only: bool = False) -> None:
    """Compare all files with their recorded size and SHA-256, and check for unlisted files.

    The DataError lists all problems.
    """
    problems = [
        Problem(
            f"file is not part of the data set (SHA-256 {sha256_file(path)})",
            str(path),
            code="data.unexpected-file",
        )
        for path in sorted(folder.iterdir())
        if path.name not in (*manifest["files"], *_UNLISTED) and not path.name.startswith(".")
    ]
    problems += _file_problems(folder, manifest, sizes_only)
    if problems:
        raise _rebuild_error(folder, *problems)


def open_split(folder: Path, manifest: dict[str, Any], name: str) -> TokenSplit:
    """Open one split after verifying every byte of it.

    Raises DataError listing every missing or damaged file.
    """
    split = manifest["splits"][name]
    names = [*split["shards"], *filter(None, [split["index"]])]
    files = {file: manifest["files"][file] for file in names}
    if problems := _file_problems(folder, {"files": files}, sizes_only=False):
        raise _rebuild_error(folder, *problems)
    return _split(folder, manifest, name)


def _file_problems(folder: Path, manifest: dict[str, Any], sizes_only: bool) -> list[Problem]:
    problems = []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.exists():
            problems.append(Problem("missing", str(path), code="data.missing"))
        elif (size := path.stat().st_size) != expected["bytes"]:
            what = f"damaged: wrong size (expected {expected['bytes']} bytes, got {size})"
            problems.append(Problem(what, str(path), code="data.damaged"))
        elif not sizes_only and (digest := sha256_file(path)) != expected["sha256"]:
            what = f"damaged: SHA-256 mismatch (expected {expected['sha256']}, got {digest})"
            problems.append(Problem(what, str(path), code="data.damaged"))
    return problems


def content_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of all that a run reads: the tokenizer, each file's name and digest."""
    files = {name: file["sha256"] for name, file in manifest["files"].items()}
    content = {"files": files, "tokenizer": manifest["tokenizer"]["digest"]}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest without its seal."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def _split(folder: Path, manifest: dict[str, Any], name: str) -> TokenSplit:
    split = manifest["splits"][name]
    index = folder / split["index"] if split["index"] else None
    return TokenSplit(name, [folder / shard for shard in split["shards"]], index)


def _rebuild_error(folder: Path, *problems: Problem) -> DataError:
    """Build the error; its last problem gets the command to prepare the data set again."""
    remedy = f"type: rm -r {shlex.quote(str(folder))} && make data"
    return DataError(*problems[:-1], replace(problems[-1], next=remedy))


# Target of padded positions; torch's cross-entropy ignores it.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class EvaluationWindow:
    """Window of ``length`` tokens at ``offset`` of a split; all but the first are predicted."""

    # Position of the document in the index of its split, or number of the window if document
    # boundaries are unknown. Names may be equal: a file of the user chooses them.
    document: int
    offset: int
    length: int

    @property
    def predicted(self) -> int:
        """Return the number of predicted tokens."""
        return self.length - 1


def evaluation_windows(
    split: TokenSplit, block_size: int, budget_tokens: int, documents: int = 0
) -> list[EvaluationWindow]:
    """Return the windows of an evaluation of at most ``budget_tokens`` predicted tokens.

    With a number of ``documents``, the windows are those of ``_whole_documents``, without a budget.
    Every document is cut into windows of ``block_size + 1`` tokens that overlap by one token, so
    each token except a document's first is predicted once, and no context crosses a document
    boundary. Windows are sorted by SHA-256(document digest, window number), which mixes documents,
    and selected from the front until the budget is used: a larger budget only adds windows.
    Raises ConfigError if the budget is smaller than the first window.
    """
    if documents:
        return _whole_documents(split, block_size, documents)
    if split.documents is None:
        windows = _unit_windows(split, block_size)
    else:
        cut = [
            (document, window)
            for number, document in enumerate(split.documents)
            for window in _cut(number, document, block_size)
        ]
        windows = [w for _, w in sorted(cut, key=lambda pair: _order(pair[0], pair[1].offset))]
    chosen = []
    for window in windows:
        budget_tokens -= window.predicted
        if budget_tokens < 0:
            break
        chosen.append(window)
    if not chosen:
        raise ConfigError(
            Problem(
                f"smaller than one evaluation window of {block_size} predicted tokens",
                "EVAL_TOKENS",
                "type: make menuconfig, and set EVAL_TOKENS to at least BLOCK_SIZE",
                code="config.out-of-range",
            )
        )
    return chosen


def evaluation_batches(
    split: TokenSplit, windows: Sequence[EvaluationWindow], block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs x [B, T] and targets y [B, T] (int64).

    T is ``block_size``; a short window is padded with x = 0 and y = −100. The last batch may
    have fewer rows.
    """
    for start in range(0, len(windows), batch_size):
        rows = windows[start : start + batch_size]
        x_BT = np.zeros((len(rows), block_size), dtype=np.int64)
        y_BT = np.full((len(rows), block_size), IGNORE_INDEX, dtype=np.int64)
        for i, row in enumerate(rows):
            tokens = split.window(row.offset, row.length)
            x_BT[i, : row.predicted] = tokens[:-1]
            y_BT[i, : row.predicted] = tokens[1:]
        yield x_BT, y_BT


def _cut(number: int, document: DocumentSpan, block_size: int) -> list[EvaluationWindow]:
    end = document.offset + document.length
    starts = range(document.offset, end - 1, block_size)
    return [EvaluationWindow(number, s, min(block_size + 1, end - s)) for s in starts]


def _order(document: DocumentSpan, offset: int) -> tuple[bytes, int]:
    """Return the sort key of a window; identical documents are ordered by their position."""
    within = offset - document.offset
    return hashlib.sha256(f"{document.digest}:{within}".encode()).digest(), offset


def _whole_documents(split: TokenSplit, block_size: int, count: int) -> list[EvaluationWindow]:
    """Return windows that predict each token of ``count`` documents, or of all if there are fewer.

    The first window of a document begins with the end of text before it, which predicts the first
    token. The documents are the first by SHA-256 of their digests: the same for every tokenizer.
    """
    assert split.documents is not None, "EVAL_DOCUMENTS of a token file"
    numbered = list(enumerate(split.documents))
    chosen = sorted(numbered, key=lambda pair: _order(pair[1], pair[1].offset))[:count]
    spans = [(n, replace(d, offset=d.offset - 1, length=d.length + 1)) for n, d in chosen]
    return [window for number, span in spans for window in _cut(number, span, block_size)]


def _unit_windows(split: TokenSplit, block_size: int) -> list[EvaluationWindow]:
    """Cut a split with unknown document boundaries as one document; each window is a unit."""
    whole = DocumentSpan("", 0, split.n_tokens, split.name)
    windows = sorted(_cut(0, whole, block_size), key=lambda w: _order(whole, w.offset))
    return [replace(window, document=window.offset // block_size) for window in windows]
