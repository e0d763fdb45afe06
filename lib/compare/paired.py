"""Paired loss difference of two runs over their evaluation documents.

Both runs are evaluated on the same documents, so each document gives a pair. The spread is over
documents of these two models; it does not estimate the spread over seeds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lib.repro.per_query import read_items
from lib.rundir import RunDir


@dataclass(frozen=True)
class PairedLoss:
    """Loss of B minus loss of A in nats per token; negative if B is better."""

    loss_a: float
    loss_b: float
    documents: int
    # Mean and sample standard deviation over documents of the difference in mean document loss.
    mean: float
    sd: float | None
    # Number of documents on which B has the lower loss, and on which both losses are equal.
    better: int
    equal: int
    # Exact two-sided sign test over documents with different losses; None without any.
    sign_test_p: float | None

    @property
    def difference(self) -> float:
        """Return the difference of the per-token losses over all tokens."""
        return self.loss_b - self.loss_a


def paired_loss(a: RunDir, b: RunDir) -> PairedLoss:
    """Compare two per_query.csv files that contain the same documents in the same order."""
    rows_a, rows_b = _losses(a), _losses(b)
    assert [row[:2] for row in rows_a] == [row[:2] for row in rows_b], "documents differ"
    gaps = [(y - x) / n for (_, n, x), (_, _, y) in zip(rows_a, rows_b, strict=True)]
    better, equal = sum(gap < 0 for gap in gaps), sum(gap == 0 for gap in gaps)
    tokens = sum(n for _, n, _ in rows_a)
    return PairedLoss(
        loss_a=math.fsum(loss for _, _, loss in rows_a) / tokens,
        loss_b=math.fsum(loss for _, _, loss in rows_b) / tokens,
        documents=len(gaps),
        mean=statistics.fmean(gaps),
        sd=statistics.stdev(gaps) if len(gaps) > 1 else None,
        better=better,
        equal=equal,
        sign_test_p=sign_test_p(better, len(gaps) - equal),
    )


def sign_test_p(better: int, n: int) -> float | None:
    """Return the exact two-sided p of ``better`` of ``n`` fair signs (Arbuthnot 1710)."""
    if n == 0:
        return None
    tail = sum(math.comb(n, k) for k in range(min(better, n - better) + 1))
    return min(1.0, 2 * tail / 2**n)


def _losses(run: RunDir) -> Sequence[tuple[str, int, float]]:
    return [(item.item_id, item.n_tokens, item.nll_sum) for item in read_items(run.per_query)]
