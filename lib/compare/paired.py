"""How far two runs' losses lie apart, document by document.

Both were judged on the same documents, so each is a pair. The spread is that over documents of
these two models: another seed would train two others, and of that it says nothing.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lib.repro.per_query import read_items
from lib.rundir import RunDir


@dataclass(frozen=True)
class PairedLoss:
    """B less A in nats per token; negative is better for B."""

    loss_a: float
    loss_b: float
    documents: int
    # Mean and sample standard deviation over documents of the difference of their mean losses.
    mean: float
    sd: float | None
    # Documents on which B has the lower loss, and those on which the two are equal.
    better: int
    equal: int
    # Exact two-sided sign test over the documents that differ; None where none does.
    sign_test_p: float | None

    @property
    def difference(self) -> float:
        """Of the losses per token, over all tokens."""
        return self.loss_b - self.loss_a


def paired_loss(a: RunDir, b: RunDir) -> PairedLoss:
    """Compare the rows of two per_query.csv that have the same documents in the same order."""
    old, new = _losses(a), _losses(b)
    assert [row[:2] for row in old] == [row[:2] for row in new], "other documents"
    gaps = [(y - x) / n for (_, n, x), (_, _, y) in zip(old, new, strict=True)]
    better, equal = sum(gap < 0 for gap in gaps), sum(gap == 0 for gap in gaps)
    tokens = sum(n for _, n, _ in old)
    return PairedLoss(
        loss_a=math.fsum(loss for _, _, loss in old) / tokens,
        loss_b=math.fsum(loss for _, _, loss in new) / tokens,
        documents=len(gaps),
        mean=statistics.fmean(gaps),
        sd=statistics.stdev(gaps) if len(gaps) > 1 else None,
        better=better,
        equal=equal,
        sign_test_p=sign_test_p(better, len(gaps) - equal),
    )


def sign_test_p(better: int, n: int) -> float | None:
    """Exact two-sided p of ``better`` of ``n`` signs under even odds (Arbuthnot 1710)."""
    if n == 0:
        return None
    tail = sum(math.comb(n, k) for k in range(min(better, n - better) + 1))
    return min(1.0, 2 * tail / 2**n)


def _losses(run: RunDir) -> Sequence[tuple[str, int, float]]:
    return [(item.item_id, item.n_tokens, item.nll_sum) for item in read_items(run.per_query)]
