"""``make check``: properties that every step must satisfy on a CPU before it costs GPU hours.

Each check is a function of a step under test. It returns a list of findings, empty if the property
holds, and can be called on one step in any process. ``gpt2/check/worker.py`` has the functions;
this module has their names, and imports no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import Config
from lib.errors import ConfigError, Problem, nearest


@dataclass(frozen=True)
class Check:
    """A checked property, by name; FAST=1 skips ``slow`` checks."""

    name: str
    slow: bool = False
    # Runs for every step; the others, which train or build models, for a cover of the steps.
    every: bool = False
    # Compares steps with each other, so it runs after all of them.
    joint: bool = False
    # Runs only for steps with a pruner.
    pruning: bool = False
    # Runs only if CHECKS= lists it: its time depends on compilers.
    by_name: bool = False

    def applies_to(self, config: Config) -> bool:
        """Return whether the configuration has the property."""
        return not self.pruning or config.pruning.name != "none"


CHECKS = {
    check.name: check
    for check in (
        Check("resolve", every=True),
        Check("full_size", slow=True, every=True),
        Check("distinct", every=True, joint=True),
        Check("declared", every=True),
        Check("causal"),
        Check("reference"),
        Check("decode"),
        Check("long", slow=True),
        Check("gradients", slow=True),
        Check("precise", slow=True),
        Check("optimized", slow=True),
        Check("pruned", slow=True, pruning=True),
        Check("budgeted", slow=True),
        Check("paired", slow=True),
        Check("reload", slow=True),
        Check("evaluated", slow=True),
        Check("parallel", slow=True),
        Check("data", every=True),
        Check("device", by_name=True),
    )
}


def select(names: str, *, fast: bool = False) -> list[Check]:
    """Return the checks listed in ``names``, in the standard order.

    An empty ``names`` selects all checks but those that run by name only, and no slow ones if
    ``fast``. Raises ConfigError that lists every unknown name with its nearest matches.
    """
    requested = names.replace(",", " ").split()
    problems = [_unknown(name) for name in requested if name not in CHECKS]
    if problems:
        raise ConfigError(*problems)
    if requested:
        return [check for check in CHECKS.values() if check.name in requested]
    return [c for c in CHECKS.values() if not (c.by_name or (fast and c.slow))]


def select_for(configs: Sequence[Config], names: str, *, fast: bool = False) -> list[Check]:
    """Return the selected checks that apply to any of ``configs``.

    Raises ConfigError if a check listed in ``names`` applies to none.
    """
    checks = select(names, fast=fast)
    applicable = [c for c in checks if not c.pruning or any(map(c.applies_to, configs))]
    if names and len(applicable) < len(checks):
        raise ConfigError(*(_not_applicable(c.name) for c in checks if c not in applicable))
    return applicable


def _unknown(name: str) -> Problem:
    hint = nearest(name, CHECKS) or f"; available: {', '.join(CHECKS)}"
    advice = "type: make check CHECKS=causal"
    return Problem(f"unknown check {name!r}{hint}", "CHECKS", advice, code="usage.unknown-check")


def _not_applicable(name: str) -> Problem:
    what = f"{name}: applies to no selected step (expected a pruner, such as PRUNING_STATE=y)"
    return Problem(what, "CHECKS", code="usage.not-applicable")


def take_ticket(ticket: Path) -> bool:
    """Return whether this process is the first to take the ticket.

    After an interrupt the folder of tickets is gone.
    """
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        return False
    return True
