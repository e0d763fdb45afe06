"""``make check``: what every step has to prove on a CPU before it may cost GPU hours.

A check is the function ``check(subject)`` of the module with its name: it returns what it found
wrong, nothing if all is well. It can be called on one step in any process, whose code it runs.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Check:
    """A property by its name; ``slow`` ones are left out by FAST=1."""

    name: str
    slow: bool = False
    # Compares steps with each other, so it waits for all of them.
    joint: bool = False

    @property
    def function(self) -> Callable[[Any], list]:
        """Takes the subject; returns the findings."""
        found: Callable[[Any], list] = vars(import_module(f"gpt2.check.{self.name}"))["check"]
        return found


CHECKS = {
    check.name: check
    for check in (
        Check("resolve"),
        Check("full_size", slow=True),
        Check("distinct", joint=True),
        Check("declared"),
        Check("gradients", slow=True),
        Check("steps", slow=True),
        Check("causal"),
        Check("isolated", slow=True),
        Check("reference"),
        Check("decode"),
        Check("field", slow=True),
        Check("entropy", slow=True),
        Check("reload", slow=True),
        Check("repeat", slow=True),
        Check("pruned", slow=True),
        Check("parallel", slow=True),
        Check("data"),
    )
}


def select(names: str, *, fast: bool = False) -> list[Check]:
    """The checks that ``names`` lists, in order; all of them, or all quick ones, where it is empty.

    ConfigError lists every unknown name with the nearest known ones.
    """
    words = names.replace(",", " ").split()
    problems = [_unknown(word) for word in words if word not in CHECKS]
    if problems:
        raise ConfigError(*problems)
    if words:
        return [check for check in CHECKS.values() if check.name in words]
    return [check for check in CHECKS.values() if not (fast and check.slow)]


def _unknown(word: str) -> Problem:
    near = difflib.get_close_matches(word, CHECKS, n=3)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(CHECKS)}"
    return Problem(f"no check is called {word!r}; {hint}", "CHECKS")
