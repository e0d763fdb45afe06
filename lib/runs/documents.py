"""Rows of ``per_query.csv``, one per document of the final evaluation, and figures from them.

Sums are exact (``math.fsum``), so they do not depend on the order of rows. Imports no torch.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from lib.json_files import DamagedRecord


@dataclass(frozen=True)
class DocumentInfo:
    """Per-document facts that depend only on data and configuration, not on the model."""

    # Name of the document, or window-000123 if the token files do not mark documents. A file of the
    # user may give two documents the same: a document is identified by its row.
    item_id: str
    # Name of the data set.
    source: str
    # Digest of the document's text; "" if only tokens are available.
    doc_sha256: str
    # Digest of the predicted tokens, 16 bits each, little-endian, in text order.
    tokens_sha256: str
    split: str
    n_tokens: int
    # Bytes of text of the predicted tokens; the end-of-text token has none.
    n_bytes: int
    # Evaluation batch that has the document's first window, and the row in it.
    batch_index: int
    row_in_batch: int


@dataclass(frozen=True)
class DocumentResult(DocumentInfo):
    """Per-document facts and the results of the model."""

    # Nats over the predicted tokens.
    nll_sum: float
    n_correct: int
    # Optimizer steps before the evaluation.
    eval_step: int

    @property
    def nll_mean(self) -> float:
        return self.nll_sum / self.n_tokens

    @property
    def bits_per_byte(self) -> float | None:
        return bits_per_byte(self.nll_sum, self.n_bytes)


# Derived columns are placed next to the columns they are computed from.
COLUMNS = (
    *("item_id", "source", "doc_sha256", "tokens_sha256", "split", "n_tokens", "n_bytes"),
    *("nll_sum", "nll_mean", "bits_per_byte", "n_correct"),
    *("eval_step", "batch_index", "row_in_batch"),
)
# Position of the cell and type of each field, in the order of the fields; other columns are derived.
_CELLS = [(COLUMNS.index(name), kind) for name, kind in get_type_hints(DocumentResult).items()]


def bits_per_byte(nats: float, n_bytes: int) -> float | None:
    """Compute nats / (bytes · ln 2); return None if there are no bytes."""
    return nats / n_bytes / math.log(2) if n_bytes else None


def to_csv(items: Iterable[DocumentResult]) -> str:
    """Return a header and one line per item."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in items:
        values = vars(item) | {"nll_mean": item.nll_mean, "bits_per_byte": item.bits_per_byte}
        # csv writes floats in their shortest exact form, and nothing for None.
        writer.writerow(values[name] for name in COLUMNS)
    return text.getvalue()


def parse_document_results(file: Path, content: bytes) -> list[DocumentResult]:
    """Return the rows of the content of ``file``. Raises DamagedRecord at the first invalid row."""
    try:
        lines = list(csv.reader(io.StringIO(content.decode("utf-8"), newline="")))
    except csv.Error as error:
        raise DamagedRecord(file, "CSV", str(error)) from None
    except ValueError as error:
        raise DamagedRecord(file, "rows", str(error)) from None
    if not lines or tuple(lines[0]) != COLUMNS:
        header = ",".join(lines[0]) if lines else "nothing"
        raise DamagedRecord(file, f"columns {','.join(COLUMNS)}", header)
    items = [_item(file, number, cells) for number, cells in enumerate(lines[1:], 2)]
    if not items:
        raise DamagedRecord(file, "at least one row", "none")
    return items


def _item(file: Path, number: int, cells: Sequence[str]) -> DocumentResult:
    if len(cells) != len(COLUMNS):
        raise DamagedRecord(file, f"line {number}: {len(COLUMNS)} cells", str(len(cells)))
    try:
        item = DocumentResult(*(kind(cells[at]) for at, kind in _CELLS))
    except ValueError as error:
        raise DamagedRecord(file, f"line {number}: numbers", str(error)) from None
    finite = math.isfinite(item.nll_sum) and item.nll_sum >= 0
    if not finite or not 0 <= item.n_correct <= item.n_tokens or item.n_tokens < 1:
        raise DamagedRecord(
            file,
            f"line {number}: n_tokens > 0, a finite nll_sum, n_correct <= n_tokens",
            f"{item.n_tokens}, {item.nll_sum}, {item.n_correct}",
        )
    return item


def evaluation_metrics(items: Sequence[DocumentResult]) -> dict[str, Any]:
    """Compute loss, perplexity, bits per byte, accuracy and size of an evaluation."""
    tokens = sum(item.n_tokens for item in items)
    nats = math.fsum(item.nll_sum for item in items)
    return {
        "val_loss": nats / tokens,
        "val_perplexity": perplexity(nats / tokens),
        "bits_per_byte": bits_per_byte(nats, sum(item.n_bytes for item in items)),
        "token_accuracy": sum(item.n_correct for item in items) / tokens,
        "eval_tokens": tokens,
        "eval_documents": len(items),
    }


def expected_calibration_error(calibration: Mapping[str, Sequence[float]]) -> float:
    """Compute Σ_m |B_m| / n · |acc(B_m) − conf(B_m)| over bins (Guo et al. 2017, eq. 3).

    ``calibration`` contains one entry per bin for ``n_tokens``, ``n_correct`` and ``confidence_sum``,
    the sum of the top-1 probabilities.
    """
    bins = zip(calibration["n_correct"], calibration["confidence_sum"], strict=True)
    gaps = [abs(correct - confidence) for correct, confidence in bins]
    return math.fsum(gaps) / sum(calibration["n_tokens"])


def train_loss(records: Iterable[Mapping[str, Any]], iterations: int) -> float:
    """Return the mean loss in the rows of metrics.jsonl over the last tenth of the iterations, at least one."""
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    first = iterations - max(1, iterations // 10)
    last = [loss for iteration, loss in losses.items() if iteration > first]
    return math.fsum(last) / len(last)


def perplexity(loss: float) -> float | str:
    """Return exp(loss), or "infinite" on overflow, because JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return "infinite"
