"""Which tensors hold NaN or infinity, as rows of a table; and where a number was not finite first."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import Problem, RunError

COLUMNS = ("param", "shape", "dtype", "device", "nonfinite", "nan", "inf")
# Of a table on a terminal; the record has every row.
MOST_ROWS = 12


class NumericsError(RunError, FloatingPointError):
    """A number that has to be finite is not; ``record`` holds what is known of it, as plain JSON.

    ``tensors`` go into a file beside the record. ``undone`` says that weights, optimizer and random
    numbers are, on every rank, those that the step began with. ``alone`` says that the other ranks
    do not know of it.
    """

    def __init__(
        self,
        problem: Problem,
        record: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        undone: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(problem)
        self.record = record
        self.tensors = dict(tensors or {})
        self.undone = undone
        self.alone = alone


@dataclass(frozen=True)
class BadTensor:
    """A weight or gradient that is not finite everywhere."""

    param: str
    # weight or gradient
    holds: str
    shape: list[int]
    dtype: str
    device: str
    nonfinite: int
    nan: int
    inf: int
    # Of the first such element, counted in row-major order.
    first_bad_index: int

    @property
    def name(self) -> str:
        """How it is called in a message."""
        return self.param if self.holds == "weight" else f"gradient of {self.param}"


def bad_tensors(found: Iterable[tuple[str, Tensor | None]], holds: str) -> list[BadTensor]:
    """A row for each named tensor with an element that is not finite, in the order given."""
    rows = ((name, t, ~torch.isfinite(t.detach())) for name, t in found if t is not None)
    return [_row(name, t.detach(), bad, holds) for name, t, bad in rows if bool(bad.any())]


def table(rows: Iterable[Mapping[str, Any]], first: tuple[str, ...] = ()) -> list[str]:
    """Rows under ``COLUMNS`` (and ``first`` before them) as lines that line up; names in full."""
    columns = (*first, *COLUMNS)
    found = [[str(row[column]) for column in columns] for row in rows]
    shown = [list(columns), *found[:MOST_ROWS]]
    widths = [max(len(line[i]) for line in shown) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in shown]
    more = len(found) - MOST_ROWS
    return [*lines, f"and {more} more"] if more > 0 else lines


def as_rows(found: Iterable[BadTensor]) -> list[dict[str, Any]]:
    """As plain JSON."""
    return [asdict(row) for row in found]


def number(value: float) -> float | str:
    """``value``, as text where JSON has no number for it: NaN, infinity or -infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


@dataclass
class FirstBadModule:
    """The module that was the first to give something that is not finite, innermost first."""

    name: str = ""
    _handles: list[Any] = field(default_factory=list, repr=False)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Look at what every module of ``model`` gives in forward passes inside."""
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            tensors = [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]
            # Scores of what a query must not see are -infinity by design.
            if not self.name and any(bool((t.isnan() | t.isposinf()).any()) for t in tensors):
                self.name = name or "the model"

        return look


def _row(name: str, tensor: Tensor, bad: Tensor, holds: str) -> BadTensor:
    nan = int(torch.isnan(tensor).sum())
    count = int(bad.sum())
    return BadTensor(
        param=name,
        holds=holds,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        nonfinite=count,
        nan=nan,
        inf=count - nan,
        first_bad_index=int(bad.flatten().int().argmax()),
    )
