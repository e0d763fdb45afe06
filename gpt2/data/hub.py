"""Large data sets of the Hugging Face hub, read as a stream: from the hub, or from a local copy."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpt2.data.corpus import Document
from gpt2.data.options import DataConfig
from gpt2.data.packages import Package
from lib.errors import DataError, Problem

# Parquet ends with its footer, the footer's length in four bytes, and this.
_PARQUET = b"PAR1"
_TAIL_BYTES = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What a URL asks for may be signed: it is a secret.
_URL_QUERY = re.compile(r"\?[^\s'\")]+")


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it: its repository on the hub, and its licence."""

    repository: str
    licence: str


PUBLISHED = {
    "finewebedu": Published(
        "HuggingFaceFW/fineweb-edu",
        "ODC-By 1.0, and Common Crawl's terms of use; texts: their authors'",
    ),
    "openwebtext": Published(
        "Skylion007/openwebtext",
        "packaging: CC0 1.0; texts: their authors'",
    ),
}


@dataclass(frozen=True)
class ParquetFile:
    """A file of a local copy: its path within it, its size, and the SHA-256 of its footer.

    The footer holds the schema and where each column of each row group lies, with its statistics:
    enough to tell files apart without reading tens of gigabytes.
    """

    name: str
    bytes: int
    footer_sha256: str


@dataclass(frozen=True)
class HubCorpus:
    """A data set of the hub, or its ``files`` in the local folder ``path``."""

    published: Published
    # Subset and revision on the hub; "" for a local folder.
    subset: str
    revision: str
    path: Path | None
    files: tuple[ParquetFile, ...]
    # Training tokens after which it is enough.
    tokens: int
    packages: tuple[Package, ...] = ()

    def identity(self) -> Any:
        """Repository, subset, revision or files, and how much of it is taken."""
        files = [[f.name, f.bytes, f.footer_sha256] for f in self.files]
        return [self.published.repository, self.subset, self.revision, files, self.tokens]

    def provenance(self, commit: str) -> list[dict[str, Any]]:
        """One record: what was read, as the hub resolved it, and its licence."""
        return [
            {
                "repository": self.published.repository,
                "subset": self.subset,
                "revision": self.revision,
                "commit": commit,
                "files": [vars(f) for f in self.files],
                "training_tokens": self.tokens,
                "licence": self.published.licence,
            }
        ]

    @property
    def place(self) -> str:
        """The repository, or the local folder."""
        return str(self.path or self.published.repository)


def find(config: DataConfig, build_dir: Path) -> HubCorpus:
    """What ``config`` chooses, without a network. DataError on a bad DATASET_PATH."""
    path = build_dir / config.dataset_path if config.dataset_path else None
    return HubCorpus(
        PUBLISHED[config.dataset],
        config.dataset_subset,
        config.dataset_revision,
        path,
        _local_files(path) if path else (),
        config.dataset_tokens,
    )


class Stream:
    """The documents of ``corpus`` in its own order, from the start or from a ``position``.

    ``commit`` is what an earlier part was read at; "" asks the hub. Raises DataError where the
    package, the hub or the files are missing, and when reading breaks off.
    """

    def __init__(
        self, corpus: HubCorpus, commit: str = "", position: Mapping[str, Any] | None = None
    ) -> None:
        if find_spec("datasets") is None:
            what = f"{corpus.place} is read with the package datasets, which is not installed"
            raise DataError(Problem(what, next="type: make setup EXTRAS=datasets"))
        self._corpus = corpus
        with _source_errors(corpus):
            # "" for a local folder, which has no history.
            self.commit = commit or ("" if corpus.path else _resolve(corpus))
            self._dataset = _load(corpus, self.commit)
        self._number = 0
        if position is not None:
            self._dataset.load_state_dict(dict(position["dataset"]))
            self._number = position["number"]

    def position(self) -> dict[str, Any]:
        """Where it stands, as JSON types: behind the last document that it gave."""
        return {"dataset": self._dataset.state_dict(), "number": self._number}

    def __iter__(self) -> Iterator[Document]:
        """The documents that are left, with the id they were published with, or their number."""
        with _source_errors(self._corpus):
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
        if not isinstance(text, str):
            found = f"row {number} has none" if "text" in row else f"there are {', '.join(row)}"
            what = f"expected text in the column text; {found}"
            raise DataError(Problem(what, self._corpus.place, "give files of the same columns"))
        return Document(name if isinstance(name, str) else str(number), text)


def _load(corpus: HubCorpus, commit: str) -> Any:
    """The one call that reads the hub and a local folder alike."""
    # Imported here: an extra, which takes a second to load.
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(
        corpus.place,
        name=corpus.subset or None,
        revision=commit or corpus.revision or None,
        split="train",
        streaming=True,
    )


def _resolve(corpus: HubCorpus) -> str:
    """The commit that the revision now stands for; "" where datasets knows it from its cache."""
    import datasets

    subset, revision = corpus.subset or None, corpus.revision or None
    found = datasets.load_dataset_builder(corpus.place, name=subset, revision=revision).hash
    return found if found and _COMMIT.fullmatch(found) else ""


def _local_files(folder: Path) -> tuple[ParquetFile, ...]:
    paths = sorted(folder.rglob("*.parquet"))
    if not paths:
        what = "no *.parquet in it" if folder.is_dir() else "no such folder"
        raise _bad(folder, what)
    return tuple(_look(path, path.relative_to(folder).as_posix()) for path in paths)


def _look(path: Path, name: str) -> ParquetFile:
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read()
            footer = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
            if not tail.endswith(_PARQUET) or footer > size:
                raise _bad(path, "not a whole parquet file: it has no footer")
            stream.seek(size - footer)
            return ParquetFile(name, size, hashlib.sha256(stream.read()).hexdigest())
    except OSError as error:
        raise _bad(path, f"cannot read: {error.strerror}") from None


def _bad(where: Path, what: str) -> DataError:
    return DataError(Problem(what, str(where), "mend it, or set DATASET_PATH, and type: make data"))


@contextmanager
def _source_errors(corpus: HubCorpus) -> Iterator[None]:
    """What the hub, the network or a file refuses, with every way to go on."""
    import datasets
    from huggingface_hub.utils import httpx

    try:
        yield
    # ValueError: no such subset, and what pyarrow says of a damaged file.
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        # One line, and at times an empty one.
        reason = " ".join(_URL_QUERY.sub("", str(error)).split()) or type(error).__name__
        raise DataError(Problem(f"cannot be read: {reason}", corpus.place, _REMEDY)) from error


_REMEDY = (
    "with a network, type make data: it goes on from what is done. Without one: "
    "make menuconfig, and set DATASET_PATH to a folder of its parquet files, or DATASET_STAND_IN "
    "for the default corpus, or DATASET_CUSTOM with a train.bin and val.bin"
)
