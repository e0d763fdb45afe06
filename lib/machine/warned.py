"""Recording of non-deterministic operations from the warnings of torch, each operation once."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

from lib.machine.options import MachineConfig

# Wording of torch for an operation, a fused attention kernel and a product without a workspace.
_WARNING = (
    r"(?P<name>.+?) (does not have a deterministic implementation"
    r"|defaults to a non-deterministic algorithm)"
    r"|.*not deterministic because it uses (?P<library>CuBLAS)"
)


class WarnedOperations:
    """Names of non-deterministic operations; ``report`` is called with each new name."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._names: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Return all recorded names, sorted."""
        return sorted(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Add names recorded by an earlier process."""
        self._names.update(names)

    def meet(self, message: str) -> bool:
        """Record the operation if ``message`` is such a warning; return whether it is."""
        match = re.match(_WARNING, message, re.DOTALL)
        if match is None:
            return False
        name = match["name"] or match["library"]
        if name not in self._names:
            self._names.add(name)
            self._report(name)
        return True


@contextmanager
def noting_warned(
    machine: MachineConfig, report: Callable[[str], None]
) -> Iterator[WarnedOperations | None]:
    """Record such warnings of torch inside the context instead of printing them.

    Yields None unless ``DETERMINISTIC`` is warn. Warning filters are process-wide. torch emits some
    warnings once per process, and Python once per location; inside, each is emitted every time.
    Warnings of the backward pass come from its thread.
    """
    if machine.deterministic != "warn":
        yield None
        return
    operations, warn_always = WarnedOperations(report), torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNING)
        showwarning = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> Any:
            if not operations.meet(str(message)):
                showwarning(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        torch.set_warn_always(True)
        try:
            yield operations
        finally:
            torch.set_warn_always(warn_always)
