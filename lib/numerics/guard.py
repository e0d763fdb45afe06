"""Detection of tensors with NaN or infinity, and of the first module that outputs them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import Problem, RunError

COLUMNS = ("param", "shape", "dtype", "device", "nonfinite", "nan", "inf")
# Maximum rows of a table on a terminal; the record contains every row.
MOST_ROWS = 12


class NumericsError(RunError, FloatingPointError):
    """A value is non-finite; ``record`` contains the diagnostics as plain JSON.

    ``tensors`` are stored in a file next to the record. ``undone`` means that weights, optimizer
    and random generators were restored, on every rank, to the start of the step. ``alone`` means
    that the error was raised on this rank only.
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
    """A weight or gradient with non-finite elements."""

    param: str
    # weight or gradient.
    holds: str
    shape: list[int]
    dtype: str
    device: str
    nonfinite: int
    nan: int
    inf: int
    # Row-major index of the first non-finite element.
    first_bad_index: int

    @property
    def name(self) -> str:
        """Return the name of the tensor for messages."""
        return self.param if self.holds == "weight" else f"gradient of {self.param}"


def bad_tensors(tensors: Iterable[tuple[str, Tensor | None]], holds: str) -> list[BadTensor]:
    """Return a row for each named tensor with non-finite elements, in input order."""
    rows = ((name, t, ~torch.isfinite(t.detach())) for name, t in tensors if t is not None)
    return [_row(name, t.detach(), bad, holds) for name, t, bad in rows if bool(bad.any())]


def table(rows: Iterable[Mapping[str, Any]], first: tuple[str, ...] = ()) -> list[str]:
    """Format rows as aligned lines: columns ``first``, then ``COLUMNS``; full names."""
    columns = (*first, *COLUMNS)
    cells = [[str(row[column]) for column in columns] for row in rows]
    shown = [list(columns), *cells[:MOST_ROWS]]
    widths = [max(len(line[i]) for line in shown) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in shown]
    hidden = len(cells) - MOST_ROWS
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def as_rows(tensors: Iterable[BadTensor]) -> list[dict[str, Any]]:
    """Return the tensors as plain JSON."""
    return [asdict(row) for row in tensors]


def number(value: float) -> float | str:
    """Return ``value``, or "NaN", "infinity" or "-infinity", for which JSON has no number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


@dataclass
class FirstBadModule:
    """Recorder of the first (innermost) module with non-finite output."""

    name: str = ""
    _handles: list[Any] = field(default_factory=list, repr=False)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Check the output of every module of ``model`` in forward passes inside the context."""
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            tensors = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
            # Masked attention scores are -infinity by design.
            if not self.name and any(bool((t.isnan() | t.isposinf()).any()) for t in tensors):
                self.name = name or "the model"

        return check


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
