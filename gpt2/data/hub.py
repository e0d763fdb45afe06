"""Large data sets of the Hugging Face hub, streamed from the hub or from a local copy."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpt2.data.options import STREAMED_DATASETS, DataOptions
from gpt2.data.split import Document
from lib.errors import DataError, Problem

# A parquet file ends with its footer, the footer's length in four bytes, and this magic number.
_PARQUET = b"PAR1"
_TAIL_BYTES = 8
_REMEDY = (
    "with network access, type make data: it resumes from the last checkpoint. Without: "
    "make menuconfig, and set DATASET_PATH to a folder of its parquet files, or DATASET_STAND_IN "
    "for the default corpus, or DATASET_CUSTOM with a train.bin and val.bin"
)


@dataclass(frozen=True)
class HubCorpus:
    """A data set of the hub, or its ``files`` in the local folder ``path``."""

    repository: str
    licence: str
    # Subset and revision on the hub; "" for a local folder.
    subset: str
    revision: str
    path: Path | None
    # Relative path, size and SHA-256 of the footer of each file: the footer has the schema, and the
    # position and statistics of each column, enough to identify a file of many gigabytes.
    files: tuple[tuple[str, int, str], ...]
    # Budget in training tokens.
    tokens: int
    packages = ()

    @classmethod
    def of(cls, config: DataOptions, build_dir: Path) -> "HubCorpus":
        """Return the data set of ``config``; raise DataError if DATASET_PATH is missing or invalid."""
        path = build_dir / config.dataset_path if config.dataset_path else None
        return cls(
            *STREAMED_DATASETS[config.dataset],
            config.dataset_subset,
            config.dataset_revision,
            path,
            _local_files(path) if path else (),
            config.dataset_tokens,
        )

    def unit(self, val_fraction: float) -> str:
        return "document"

    def identity(self) -> Any:
        return [self.repository, self.subset, self.revision, self.files, self.tokens]

    def provenance(self, commit: str = "") -> list[dict[str, Any]]:
        """Return one record: what was read, with the commit the hub resolved, and the licence."""
        keys = ("name", "bytes", "footer_sha256")
        record = {
            "repository": self.repository,
            "subset": self.subset,
            "revision": self.revision,
            "commit": commit,
            "files": [dict(zip(keys, file, strict=True)) for file in self.files],
            "training_tokens": self.tokens,
            "licence": self.licence,
        }
        return [record]

    @property
    def place(self) -> str:
        return str(self.path or self.repository)


class DocumentStream:
    """Iterator over the documents of ``corpus`` in published order, from a ``checkpoint``.

    Raises DataError if the package, the hub or the files are missing, or if reading fails.
    """

    def __init__(self, corpus: HubCorpus, checkpoint: Mapping[str, Any] | None = None) -> None:
        if find_spec("datasets") is None:
            what = f"{corpus.place}: requires the package datasets (not installed)"
            remedy = "type: make setup EXTRAS=datasets"
            raise DataError(Problem(what, next=remedy, code="env.missing-package"))
        # Imported here: an optional package that takes a second to import.
        import datasets

        self._corpus, self._number = corpus, 0
        chosen = {"name": corpus.subset or None, "revision": corpus.revision or None}
        with _source_errors(corpus):
            # A local folder has no commits; "" also if datasets resolves the revision from its cache.
            self.commit = checkpoint["commit"] if checkpoint else ""
            if not checkpoint and not corpus.path:
                commit = datasets.load_dataset_builder(corpus.place, **chosen).hash
                self.commit = commit if commit and re.fullmatch(r"[0-9a-f]{40}", commit) else ""
            datasets.disable_progress_bars()
            chosen["revision"] = self.commit or chosen["revision"]
            self._dataset = datasets.load_dataset(
                corpus.place, **chosen, split="train", streaming=True
            )
        if checkpoint:
            self._dataset.load_state_dict(dict(checkpoint["position"]["dataset"]))
            self._number = checkpoint["position"]["number"]

    def checkpoint(self) -> dict[str, Any]:
        """Return the commit, and the position after the last document yielded, as JSON types."""
        position = {"dataset": self._dataset.state_dict(), "number": self._number}
        return {"commit": self.commit, "position": position}

    def __iter__(self) -> Iterator[Document]:
        """Yield the remaining documents; a document without an id gets its number as id."""
        rows = iter(self._dataset)
        while True:
            with _source_errors(self._corpus):
                row = next(rows, None)
            if row is None:
                return
            yield self._document(row)

    def _document(self, row: Mapping[str, Any]) -> Document:
        number, self._number = self._number, self._number + 1
        text, name = row.get("text"), row.get("id")
        if isinstance(text, str):
            return Document(name if isinstance(name, str) else str(number), text)
        actual = f"{type(text).__name__} in row {number}"
        if "text" not in row:
            actual = f"columns {', '.join(row)}"
        what = f"invalid rows (expected strings in the column text, got {actual})"
        remedy = "provide files with a column text"
        raise DataError(Problem(what, self._corpus.place, remedy, code="data.invalid-format"))


def _local_files(folder: Path) -> tuple[tuple[str, int, str], ...]:
    paths = sorted(folder.rglob("*.parquet"))
    if not paths:
        what = "contains no *.parquet file" if folder.is_dir() else "no such folder"
        raise _bad_path(folder, what, "data.missing")
    return tuple((path.relative_to(folder).as_posix(), *_read_footer(path)) for path in paths)


def _read_footer(path: Path) -> tuple[int, str]:
    """Return the size of a file and the SHA-256 of its footer."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read()
            footer = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
            if not tail.endswith(_PARQUET) or footer > size:
                raise _bad_path(path, "truncated parquet file: no footer", "data.damaged")
            stream.seek(size - footer)
            return size, hashlib.sha256(stream.read()).hexdigest()
    except OSError as error:
        raise _bad_path(path, f"cannot read: {error.strerror}", "data.unreadable") from None


def _bad_path(path: Path, what: str, code: str) -> DataError:
    remedy = "fix the files, or change DATASET_PATH, and type: make data"
    return DataError(Problem(what, str(path), remedy, code=code))


@contextmanager
def _source_errors(corpus: HubCorpus) -> Iterator[None]:
    """Convert errors of the hub, the network or a file to DataError with all remedies."""
    import datasets
    from huggingface_hub.utils import httpx

    try:
        yield
    # ValueError: no such subset, or a damaged file (from pyarrow).
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        # On one line, without the queries of signed URLs, which are secret; some errors have none.
        message = " ".join(re.sub(r"\?[^\s'\")]+", "", str(error)).split())
        what = f"cannot read: {message or type(error).__name__}"
        raise DataError(Problem(what, corpus.place, _REMEDY, code="data.unreadable")) from error
