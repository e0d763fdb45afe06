"""The figures of ``summary.json`` that follow from other files, each by one formula; no torch.

The trainer writes them and the audit computes them again. Sums are exact (``math.fsum``), so the
order of rows is no matter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.repro.per_query import Item, bits_per_byte

# The training loss of a run is the mean over this last part of its iterations.
_TRAIN_LOSS_PART = 0.1


def evaluation_figures(items: Sequence[Item]) -> dict[str, Any]:
    """Loss, perplexity, bits per byte, accuracy and size of an evaluation."""
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
    """Σ_m |B_m| / n · |acc(B_m) − conf(B_m)| over bins of equal width (Guo et al. 2017, eq. 3).

    ``calibration`` has for each bin ``n_tokens``, ``n_correct`` and ``confidence_sum``, the
    probabilities that the model gave to its own first choice.
    """
    bins = zip(calibration["n_correct"], calibration["confidence_sum"], strict=True)
    gaps = [abs(correct - confidence) for correct, confidence in bins]
    return math.fsum(gaps) / sum(calibration["n_tokens"])


def train_loss(records: Iterable[Mapping[str, Any]], iterations: int) -> float:
    """Mean over the last tenth of the iterations, at least one: less noise than one batch has.

    ``records`` are those of ``metrics.jsonl``.
    """
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    first = iterations - max(1, int(iterations * _TRAIN_LOSS_PART))
    last = [loss for iteration, loss in losses.items() if iteration > first]
    return math.fsum(last) / len(last)


def perplexity(loss: float) -> float | str:
    """exp(loss), as text where it is beyond floating point: JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return "infinite"
