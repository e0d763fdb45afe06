"""Operations that have no deterministic form, as torch warns of them: each noted once."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

from lib.machine.options import MachineConfig

# How torch puts it: an operation by name, a fused attention kernel, a product without a workspace.
_WARNING = (
    r"(?P<name>.+?) (does not have a deterministic implementation"
    r"|defaults to a non-deterministic algorithm)"
    r"|.*not deterministic because it uses (?P<library>CuBLAS)"
)


class WarnedOperations:
    """Names of operations; ``said`` is called with each when it is met for the first time."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self._names: set[str] = set()

    @property
    def names(self) -> list[str]:
        """All that were met, sorted."""
        return sorted(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Note what an earlier process met."""
        self._names.update(names)

    def meet(self, message: str) -> bool:
        """Whether ``message`` is torch's word on such an operation, which is then noted."""
        found = re.match(_WARNING, message, re.DOTALL)
        if found is None:
            return False
        name = found["name"] or found["library"]
        if name not in self._names:
            self._names.add(name)
            self._said(name)
        return True


@contextmanager
def noting_warned(
    machine: MachineConfig, said: Callable[[str], None]
) -> Iterator[WarnedOperations | None]:
    """Inside, torch's warnings of that kind are noted and not shown; None unless they are asked for.

    The filters are the process's. torch gives some warnings once in a process, and Python once in a
    place; inside, each comes every time. What the backward pass warns of comes from its thread.
    """
    if machine.deterministic != "warn":
        yield None
        return
    met, always = WarnedOperations(said), torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNING)
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> Any:
            if not met.meet(str(message)):
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        torch.set_warn_always(True)
        try:
            yield met
        finally:
            torch.set_warn_always(always)
