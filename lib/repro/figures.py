"""Metrics of ``summary.json`` that are computed from other files of the run; no torch.

The trainer writes these metrics, and the audit recomputes them with the same functions. Sums are
exact (``math.fsum``), so they do not depend on the order of rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.repro.per_query import Item, bits_per_byte

# The training loss of a run is the mean over this final fraction of its iterations.
_TRAIN_LOSS_FRACTION = 0.1


def evaluation_figures(items: Sequence[Item]) -> dict[str, Any]:
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
    """Compute Σ_m |B_m| / n · |acc(B_m) − conf(B_m)| over bins of equal width.

    Source: Guo et al. 2017, eq. 3. ``calibration`` contains one entry per bin for ``n_tokens``,
    ``n_correct`` and ``confidence_sum``, the sum of the top-1 probabilities.
    """
    bins = zip(calibration["n_correct"], calibration["confidence_sum"], strict=True)
    gaps = [abs(correct - confidence) for correct, confidence in bins]
    return math.fsum(gaps) / sum(calibration["n_tokens"])


def train_loss(records: Iterable[Mapping[str, Any]], iterations: int) -> float:
    """Return the mean loss over the last tenth of the iterations, but at least one iteration.

    The mean has less noise than the loss of one batch. ``records`` are the rows of
    ``metrics.jsonl``.
    """
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    first = iterations - max(1, int(iterations * _TRAIN_LOSS_FRACTION))
    last = [loss for iteration, loss in losses.items() if iteration > first]
    return math.fsum(last) / len(last)


def perplexity(loss: float) -> float | str:
    """Return exp(loss), or "infinite" on overflow, because JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return "infinite"
