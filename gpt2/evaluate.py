"""Evaluation: loss on a fixed list of held-out windows, per document and in total.

The total is the mean over tokens. Batches do not depend on the world size; each rank evaluates a share.

B rows of a batch, T tokens, W windows, M confidence bins, S sums per window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import (
    IGNORE_INDEX,
    EvaluationWindow,
    evaluation_batches,
    evaluation_windows,
)
from gpt2.model import GPT
from lib.env.machine import autocast
from lib.env.process_group import ProcessGroup

# Number of equal-width confidence bins, as in Guo et al. 2017.
CALIBRATION_BINS = 15


@dataclass(frozen=True)
class DocumentLoss:
    """Scores of one document; ``nll_sum`` is in nats over ``n_tokens`` predicted tokens."""

    # Position of the document; see ``EvaluationWindow``.
    document: int
    n_tokens: int
    n_correct: int
    nll_sum: float


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation: documents by position, and calibration bins."""

    documents: tuple[DocumentLoss, ...]
    # n_tokens, n_correct and confidence_sum of each bin.
    calibration: dict[str, list[float]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(d.n_tokens for d in self.documents)

    @property
    def loss(self) -> float:
        """Return the mean loss per token in nats, summed exactly in any document order."""
        return math.fsum(d.nll_sum for d in self.documents) / self.tokens

    @property
    def accuracy(self) -> float:
        """Return the fraction of tokens with the target as the largest logit."""
        return sum(d.n_correct for d in self.documents) / self.tokens


class Evaluator:
    """Evaluator of a model on the windows of one configuration; every call rereads the data."""

    def __init__(
        self,
        config: Config,
        split: TokenSplit,
        device: torch.device,
        group: ProcessGroup | None = None,
        report: Callable[[float], object] = lambda share: None,
    ) -> None:
        """Select the windows; ``report`` receives the share that is done. Raises ConfigError."""
        self._machine = config.machine
        self.split = split
        self._block_size = config.model.shape.block_size
        self.batch_size = config.train.batch_size
        self._device = device
        self._group = ProcessGroup() if group is None else group
        self._report = report
        data = config.data
        self.windows = evaluation_windows(
            split, self._block_size, data.eval_tokens, data.eval_documents
        )

    def __call__(
        self, model: GPT, stop: Callable[[], bool] = lambda: False
    ) -> EvaluationResult | None:
        """Evaluate ``model``; return None if ``stop`` returned true between two batches."""
        training = model.training
        model.eval()
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(gpus), torch.no_grad():
            rows_WS = self._measure(model, stop)
        model.train(training)
        if rows_WS is None:
            return None
        # Each row is non-zero on one rank only, so the sum is exact.
        rows = self._group.add(rows_WS).tolist()
        return EvaluationResult(_documents(self.windows, rows), _calibration(rows))

    def _measure(self, model: GPT, stop: Callable[[], bool]) -> Tensor | None:
        """Return the rows of the batches of this rank, [W, S], 0 for others; None after ``stop``."""
        columns = 3 + 3 * CALIBRATION_BINS
        rows_WS = torch.zeros(len(self.windows), columns, dtype=torch.float64, device=self._device)
        first = 0
        batches = evaluation_batches(self.split, self.windows, self._block_size, self.batch_size)
        for index, (x, y) in enumerate(batches):
            rank = index % self._group.size
            if rank == 0 and stop():
                return None
            self._report(first / len(self.windows))
            last = first + len(x)
            if rank == self._group.rank:
                x_BT, y_BT = torch.from_numpy(x), torch.from_numpy(y)
                rows_WS[first:last] = self._rows(model, x_BT, y_BT)
            first = last
        return rows_WS

    def _rows(self, model: GPT, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the sums of each row, [B, S] in float64.

        Columns: tokens, correct tokens and loss, then for each bin tokens, correct tokens and
        confidence.
        """
        x_BT, y_BT = x_BT.to(self._device), y_BT.to(self._device)
        with autocast(self._machine):
            losses_BT, correct_BT, confidence_BT = model.token_losses(x_BT, y_BT)
        counted_BT = y_BT != IGNORE_INDEX
        columns = (counted_BT, correct_BT & counted_BT, losses_BT * counted_BT)
        totals = torch.stack([column.double().sum(1) for column in columns], dim=1)
        # Bin m of M contains confidences in (m / M, (m + 1) / M].
        bins_BT = (confidence_BT.double() * CALIBRATION_BINS).ceil().clamp(1, CALIBRATION_BINS) - 1
        in_bin_BTM = bins_BT[..., None] == torch.arange(CALIBRATION_BINS, device=self._device)
        # Correctness and confidence of ignored targets are already zero.
        binned = (counted_BT, correct_BT, confidence_BT)
        bins = [(in_bin_BTM * column.double()[..., None]).sum(1) for column in binned]
        return torch.cat([totals, *bins], dim=1)


def _documents(
    windows: Sequence[EvaluationWindow], rows: Sequence[Sequence[float]]
) -> tuple[DocumentLoss, ...]:
    by_document: dict[int, list[Sequence[float]]] = {}
    for window, row in zip(windows, rows, strict=True):
        by_document.setdefault(window.document, []).append(row[:3])
    documents = []
    for number in sorted(by_document):
        tokens, correct, losses = zip(*by_document[number], strict=True)
        loss = DocumentLoss(number, int(sum(tokens)), int(sum(correct)), math.fsum(losses))
        documents.append(loss)
    return tuple(documents)


def _calibration(rows: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    sums = [math.fsum(column) for column in list(zip(*rows, strict=True))[3:]]
    tokens, correct, confidence = (
        sums[i * CALIBRATION_BINS : (i + 1) * CALIBRATION_BINS] for i in range(3)
    )
    return {
        "n_tokens": [int(n) for n in tokens],
        "n_correct": [int(n) for n in correct],
        "confidence_sum": confidence,
    }
