"""Evaluation: the loss on a fixed list of held-out windows, per document and in total.

The total is the mean over tokens, not over batches, and can be recomputed from the documents'
rows. Evaluation draws nothing and leaves the training's randomness where it was.

Batches are the same however many processes there are; each evaluates its share of them.

B rows of a batch, T tokens, W windows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.evaluation import IGNORED, eval_batches, evaluation_windows
from gpt2.data.store import Split
from gpt2.model import GPT
from lib.machine.group import Group
from lib.machine.setup import autocast


@dataclass(frozen=True)
class DocumentLoss:
    """One row of per_query.csv; ``loss_sum`` is in nats over ``n_tokens`` predicted tokens."""

    document: str
    n_tokens: int
    n_correct: int
    loss_sum: float


@dataclass(frozen=True)
class Evaluation:
    """The documents of one evaluation, in the order of their names."""

    documents: tuple[DocumentLoss, ...]

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(d.n_tokens for d in self.documents)

    @property
    def loss(self) -> float:
        """Mean loss of a token in nats; exact summation, so the order of documents is no matter."""
        return math.fsum(d.loss_sum for d in self.documents) / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of the tokens whose highest logit is the right one."""
        return sum(d.n_correct for d in self.documents) / self.tokens


class Evaluator:
    """The windows of one configuration, read anew by every evaluation."""

    def __init__(
        self, config: Config, split: Split, device: torch.device, group: Group = Group()
    ) -> None:
        """ConfigError when the evaluation budget is below one window."""
        self._machine = config.machine
        self._split = split
        self._block_size = config.model.shape.block_size
        self._batch_size = config.train.batch_size
        self._device = device
        self._group = group
        self._windows = evaluation_windows(split, self._block_size, config.data.eval_tokens)

    def __call__(self, model: GPT, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluate ``model``; None when ``stop`` asked to give up between two batches."""
        training = model.training
        model.eval()
        with torch.random.fork_rng(self._gpus()), torch.no_grad():
            rows_W3 = self._measure(model, stop)
        model.train(training)
        if rows_W3 is None:
            return None
        names = [window.document for window in self._windows]
        # Each row is zero on every rank but one, so the sum is exact.
        return _collect(names, self._group.add(rows_W3))

    def _measure(self, model: GPT, stop: Callable[[], bool]) -> Tensor | None:
        """The rows of this rank's batches, [W, 3] with zeros for the others; None to give up."""
        rows_W3 = torch.zeros(len(self._windows), 3, dtype=torch.float64, device=self._device)
        first = 0
        for turn, (x, y, documents) in enumerate(self._batches()):
            rank = turn % self._group.size
            if rank == 0 and stop():
                return None
            last = first + len(documents)
            if rank == self._group.rank:
                x_BT, y_BT = torch.from_numpy(x), torch.from_numpy(y)
                rows_W3[first:last] = self._rows(model, x_BT, y_BT)
            first = last
        return rows_W3

    def _batches(self) -> Iterable:
        return eval_batches(self._split, self._windows, self._block_size, self._batch_size)

    def _gpus(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else []

    def _rows(self, model: GPT, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Tokens, right tokens and summed loss of each row, [B, 3] in float64."""
        x_BT, y_BT = x_BT.to(self._device), y_BT.to(self._device)
        with autocast(self._machine):
            losses_BT, correct_BT = model.token_losses(x_BT, y_BT)
        counted_BT = y_BT != IGNORED
        columns = (counted_BT, correct_BT & counted_BT, losses_BT * counted_BT)
        return torch.stack([column.double().sum(1) for column in columns], dim=1)


def _collect(names: Sequence[str], rows_W3: Tensor) -> Evaluation:
    """Add up the rows of each document; one copy from the device for all of them."""
    documents: dict[str, list[list[float]]] = {}
    for name, row in zip(names, rows_W3.tolist(), strict=True):
        documents.setdefault(name, []).append(row)
    return Evaluation(tuple(_document(name, documents[name]) for name in sorted(documents)))


def _document(name: str, rows: list[list[float]]) -> DocumentLoss:
    tokens, correct, losses = zip(*rows, strict=True)
    return DocumentLoss(name, int(sum(tokens)), int(sum(correct)), math.fsum(losses))
