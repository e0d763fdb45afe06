"""``per_query.csv``: one row for each document of the final evaluation; imports no torch."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

_DIGEST_DIGITS = 64


@dataclass(frozen=True)
class ItemFacts:
    """One document, as data and configuration decide it before any model is asked.

    Its first token is not predicted, and a budget may leave out a part of it.
    """

    # Id of the document, or window-000123 where token files tell no documents.
    item_id: str
    # Name of the data set.
    source: str
    # Of the document's text; "" where only tokens are known.
    doc_sha256: str
    # Of the predicted tokens, 16 bits each, little-endian, in the order of the text.
    tokens_sha256: str
    split: str
    n_tokens: int
    # Text that the predicted tokens stand for; the end of a text stands for none.
    n_bytes: int
    # Where the first of its windows stood.
    batch_index: int
    row_in_batch: int


@dataclass(frozen=True)
class Item(ItemFacts):
    """The same, and what the model made of it."""

    # Nats over the predicted tokens.
    nll_sum: float
    n_correct: int
    # Optimizer steps done before the evaluation.
    eval_step: int

    @property
    def nll_mean(self) -> float:
        """Nats per token."""
        return self.nll_sum / self.n_tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None where there is no byte."""
        return bits_per_byte(self.nll_sum, self.n_bytes)


# Derived ones stand where a reader looks for them.
COLUMNS = (
    *("item_id", "source", "doc_sha256", "tokens_sha256", "split", "n_tokens", "n_bytes"),
    *("nll_sum", "nll_mean", "bits_per_byte", "n_correct"),
    *("eval_step", "batch_index", "row_in_batch"),
)
_TYPES = {field.name: field.type for field in fields(Item)}


class BadRow(ValueError):
    """What stands in the file, and what should."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected = expected
        self.found = found
        super().__init__(f"expected {expected}, found {found}")


def bits_per_byte(nats: float, n_bytes: int) -> float | None:
    """nats / (bytes · ln 2); None where there is no byte."""
    return nats / n_bytes / math.log(2) if n_bytes else None


def to_csv(items: Iterable[Item]) -> str:
    """One line for each item under the columns' names; floats in their shortest exact form."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in items:
        writer.writerow(_spelled(item, name) for name in COLUMNS)
    return text.getvalue()


def read_items(path: Path) -> list[Item]:
    """The rows of the file. BadRow at the first that is not as ``to_csv`` writes it."""
    with open(path, encoding="utf-8", newline="") as stream:
        lines = list(csv.reader(stream))
    if not lines or tuple(lines[0]) != COLUMNS:
        found = ",".join(lines[0]) if lines else "nothing"
        raise BadRow(f"the columns {','.join(COLUMNS)}", found)
    items = [_item(number, cells) for number, cells in enumerate(lines[1:], 2)]
    if not items:
        raise BadRow("a row for each document", "none")
    if twice := next(_repeated(item.item_id for item in items), None):
        raise BadRow("each item once", f"{twice} again")
    return items


def _item(number: int, cells: Sequence[str]) -> Item:
    if len(cells) != len(COLUMNS):
        raise BadRow(f"line {number}: {len(COLUMNS)} cells", str(len(cells)))
    row = dict(zip(COLUMNS, cells, strict=True))
    try:
        item = Item(**{name: kind(row[name]) for name, kind in _TYPES.items()})
    except ValueError as error:
        raise BadRow(f"line {number}: numbers", str(error)) from None
    finite = math.isfinite(item.nll_sum) and item.nll_sum >= 0
    if not finite or not 0 <= item.n_correct <= item.n_tokens or item.n_tokens < 1:
        raise BadRow(
            f"line {number}: n_tokens > 0, a finite nll_sum, n_correct <= n_tokens",
            f"{item.n_tokens}, {item.nll_sum}, {item.n_correct}",
        )
    for name in COLUMNS:
        if row[name] != str(_spelled(item, name)):
            raise BadRow(f"line {number}: {name} {_spelled(item, name)}", row[name])
    digests = [item.tokens_sha256, *filter(None, [item.doc_sha256])]
    if wrong := [d for d in digests if len(d) != _DIGEST_DIGITS]:
        raise BadRow(f"line {number}: digests of {_DIGEST_DIGITS} digits", wrong[0])
    return item


def _spelled(item: Item, name: str) -> str | int:
    """Exactly what a cell holds."""
    value = vars(item)[name] if name in _TYPES else vars(Item)[name].fget(item)
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else value


def _repeated(names: Iterable[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
