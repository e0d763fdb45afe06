"""The names of the checks: properties that every step must satisfy on a CPU before it costs GPU hours.

``gpt2/check/worker.py`` has their functions. Imports no torch.
"""

from dataclasses import dataclass

from lib.errors import ConfigError, Problem, nearest


@dataclass(frozen=True)
class Check:
    """A checked property, by name; FAST=1 skips ``slow`` checks."""

    name: str
    slow: bool = False
    # Runs for every step; the others, which train or build models, for a cover of the steps.
    every: bool = False
    # Runs only for steps with a pruner.
    pruning: bool = False
    # Runs only if CHECKS= lists it: its time depends on compilers.
    by_name: bool = False


CHECKS = {
    check.name: check
    for check in (
        Check("resolve", every=True),
        Check("full_size", slow=True, every=True),
        Check("distinct", every=True),
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


def select(names: str, *, fast: bool = False, prunes: bool = True) -> list[Check]:
    """Return the checks listed in ``names``, in the standard order.

    An empty ``names`` selects all checks but those that run by name only, no slow ones if ``fast``,
    and those of pruning only if a step ``prunes``. Raises ConfigError that lists every unknown name
    with its nearest matches, or every name that applies to no step.
    """
    requested, problems = names.replace(",", " ").split(), []
    for name in requested:
        if name not in CHECKS:
            hint = nearest(name, CHECKS) or f"; available: {', '.join(CHECKS)}"
            what, advice = f"unknown check {name!r}{hint}", "type: make check CHECKS=causal"
            problems.append(Problem(what, "CHECKS", advice, code="usage.unknown-check"))
        elif CHECKS[name].pruning and not prunes:
            what = (
                f"{name}: applies to no selected step (expected a pruner, such as PRUNING_STATE=y)"
            )
            problems.append(Problem(what, "CHECKS", code="usage.not-applicable"))
    if problems:
        raise ConfigError(*problems)
    if requested:
        return [check for check in CHECKS.values() if check.name in requested]
    skipped = [c for c in CHECKS.values() if c.by_name or (fast and c.slow)]
    return [c for c in CHECKS.values() if c not in skipped and (prunes or not c.pruning)]
