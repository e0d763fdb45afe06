"""``make check``: properties that every step must satisfy on a CPU before it costs GPU hours.

Each check is the function ``check(subject)`` of the module with the check's name. It returns a list
of findings, empty if the property holds, and can be called on one step in any process.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Check:
    """A checked property, by name; FAST=1 skips ``slow`` checks."""

    name: str
    # The module with the function check_<name>.
    module: str
    slow: bool = False
    # Compares steps with each other, so it runs after all of them.
    joint: bool = False

    @property
    def function(self) -> Callable[[Any], list]:
        """Return the check's function, which maps a subject to its findings."""
        function: Callable[[Any], list] = vars(import_module(self.module))[f"check_{self.name}"]
        return function


CHECKS = {
    check.name: check
    for check in (
        Check("resolve", "gpt2.check.cases"),
        Check("full_size", "gpt2.check.config_checks", slow=True),
        Check("distinct", "gpt2.check.distinct", joint=True),
        Check("declared", "gpt2.check.config_checks"),
        Check("gradients", "gpt2.check.model_checks", slow=True),
        Check("steps", "gpt2.check.training_checks", slow=True),
        Check("causal", "gpt2.check.model_checks"),
        Check("isolated", "gpt2.check.model_checks", slow=True),
        Check("reference", "gpt2.check.model_checks"),
        Check("decode", "gpt2.check.model_checks"),
        Check("field", "gpt2.nsa.checks", slow=True),
        Check("entropy", "gpt2.nsa.checks", slow=True),
        Check("reload", "gpt2.check.process_checks", slow=True),
        Check("repeat", "gpt2.check.training_checks", slow=True),
        Check("pruned", "gpt2.check.training_checks", slow=True),
        Check("parallel", "gpt2.check.process_checks", slow=True),
        Check("data", "gpt2.check.process_checks"),
    )
}


def select(names: str, *, fast: bool = False) -> list[Check]:
    """Return the checks listed in ``names``, in the standard order.

    An empty ``names`` selects all checks, or all that are not slow if ``fast``. Raises ConfigError
    that lists every unknown name with its nearest matches.
    """
    requested = names.replace(",", " ").split()
    problems = [_unknown(name) for name in requested if name not in CHECKS]
    if problems:
        raise ConfigError(*problems)
    if requested:
        return [check for check in CHECKS.values() if check.name in requested]
    return [check for check in CHECKS.values() if not (fast and check.slow)]


def _unknown(name: str) -> Problem:
    similar = difflib.get_close_matches(name, CHECKS, n=3)
    hint = f"nearest: {', '.join(similar)}" if similar else f"available: {', '.join(CHECKS)}"
    return Problem(f"unknown check {name!r}; {hint}", "CHECKS", code="usage.unknown-check")
