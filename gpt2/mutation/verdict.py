"""The verdict on a fault: caught by a check, equivalent to the product without it, or survived."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from gpt2.mutation.baseline import Baseline
from gpt2.mutation.cases import CASES, TrialCase
from gpt2.mutation.faults import Fault, SourceTree
from gpt2.mutation.process import Plant, TrialResult, run_trial

CAUGHT, EQUIVALENT, SURVIVED, STOPPED = "caught", "equivalent", "survived", "stopped"
# Cases that are checked first, cases that are compared with the product without the fault, and
# cases that are checked because their results changed.
_FIRST_CASES = 2
_COMPARED_CASES = 6
_CHANGED_CASES = 3
# A trial may need this many times the CPU time of the trial without a fault, and the constant.
_SLOWDOWN = 5.0
_MIN_LIMIT_SECONDS = 12.0
# Relative differences of losses that rounding may cause: in fp32 and bf16, and in float64.
_ROUNDING, _EXACT = 1e-4, 1e-9


@dataclass
class FaultVerdict:
    """FaultVerdict on a fault, with the check and the case that caught it."""

    fault: Fault
    state: str = SURVIVED
    # Name of a check; crash or "time limit" if the process ended without a finding.
    by: str = ""
    case: str = ""
    text: str = ""
    # Cases with other results than without the fault, and the largest difference of a loss.
    changed: dict[str, float | None] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0
    # Whether an exception or the end of the process caught the fault, and not a property.
    is_error: bool = False


class FaultTrial:
    """Trial of one fault in its own processes."""

    def __init__(
        self, tree: SourceTree, fault: Fault, baseline: Baseline, stopped: Callable[[], bool]
    ) -> None:
        self._fault = fault
        self._baseline = baseline
        self._stopped = stopped
        self._is_same_code = tree.is_same_code(fault)
        self._plant = Plant(fault.path, tree.planted(fault))
        self._verdict = FaultVerdict(fault)

    def run(self) -> FaultVerdict:
        """Check the concerned cases; compare their results if no check fails."""
        verdict = self._verdict
        if self._is_same_code:
            verdict.state, verdict.text = EQUIVALENT, "the same code"
            return verdict
        reconfigured = self._reconfigured()
        first = reconfigured[:_CHANGED_CASES] or self._candidates()[:_FIRST_CASES]
        if self._is_decided or self._check(first):
            return verdict
        # A step with another configuration is another step; no comparison is required.
        verdict.changed = dict.fromkeys(reconfigured) or self._compare()
        if self._is_decided:
            return verdict
        if not verdict.changed:
            verdict.state, verdict.text = EQUIVALENT, "the same results"
            return verdict
        others = [name for name in verdict.changed if name not in verdict.checked]
        if not self._check(others[:_CHANGED_CASES]) and self._changes_rounding_alone():
            verdict.state, verdict.text = EQUIVALENT, "the same losses in float64"
        return verdict

    @property
    def _is_decided(self) -> bool:
        return self._verdict.state != SURVIVED or bool(self._verdict.text)

    def _candidates(self) -> list[str]:
        """Return the cases that execute the line, cheap ones first, but not always the same."""
        names = sorted(self._fault.cases)
        Random(f"{self._fault.path}/{self._fault.node}").shuffle(names)
        return sorted(names, key=lambda name: self._baseline.check_seconds[name] > 6.0)

    def _reconfigured(self) -> list[str]:
        """Return the steps whose configuration a fault in a study changes, in any study."""
        if self._fault.area != "steps":
            return []
        result = self._run("resolved_digests", [], _MIN_LIMIT_SECONDS)
        if result is None:
            return []
        before = self._baseline.configs
        changed = [name for name, digest in before.items() if result.get(name) != digest]
        if unresolved := [name for name in changed if not result.get(name)]:
            self._verdict.state, self._verdict.by = CAUGHT, "resolve"
            self._verdict.case = unresolved[0]
        return sorted(changed, key=lambda name: name not in CASES)

    def _check(self, names: Sequence[str]) -> bool:
        """Run the checks of some cases; return whether the verdict is final."""
        for name in names:
            known = name if name in CASES else _similar(name)
            order = self._baseline.order[known]
            limit = _limit(self._baseline.check_seconds[known])
            result = self._run("run_checks", [[_case(name)], order], limit, ends_are_caught=True)
            self._verdict.checked.append(name)
            if result is not None and result["caught"]:
                caught = result["caught"]
                self._verdict.state, self._verdict.by = CAUGHT, caught["check"]
                self._verdict.case, self._verdict.text = name, caught["text"]
                self._verdict.is_error = caught["property"].startswith("check.")
            if self._is_decided:
                return True
        return False

    def _compare(self) -> dict[str, float | None]:
        """Return the cases whose results the fault changes."""
        unchecked = [n for n in self._candidates() if n not in self._verdict.checked]
        names = [*self._verdict.checked, *unchecked]
        if self._fault.function:
            names = names[:_COMPARED_CASES]
        seconds = sum(self._baseline.observe_seconds[name] for name in names)
        cases, before = [CASES[name] for name in names], self._baseline.results
        arguments = (cases, before, _CHANGED_CASES + 1, _COMPARED_CASES)
        changed: dict[str, float | None] | None
        changed = self._run("changed_cases", arguments, _limit(seconds))
        return changed or {}

    def _changes_rounding_alone(self) -> bool:
        """Compare the losses in float64 of all changed cases with those without the fault."""
        changed = self._verdict.changed
        if not all(value and value <= _ROUNDING for value in changed.values()):
            return False
        limit = _limit(2 * sum(self._baseline.observe_seconds[name] for name in changed))
        arguments = [[CASES[name] for name in changed]]
        without = run_trial("exact_losses", arguments, Plant(), limit, self._stopped)
        self._verdict.cpu_seconds += without.cpu_seconds
        now = None if without.end else self._run("exact_losses", arguments, limit)
        return now is not None and are_equal_losses(now, without.value)

    def _run(
        self,
        function: str,
        arguments: Sequence[Any],
        limit_seconds: float,
        ends_are_caught: bool = False,
    ) -> Any:
        """Return the value of a trial; None if it ended without one, which sets the verdict."""
        result: TrialResult = run_trial(
            function, arguments, self._plant, limit_seconds, self._stopped
        )
        self._verdict.cpu_seconds += result.cpu_seconds
        if not result.end:
            return result.value
        verdict = self._verdict
        verdict.text = f"{function}: {result.end}: {result.text}"
        if result.end == "stopped":
            verdict.state = STOPPED
        elif ends_are_caught or function == "resolved_digests":
            verdict.state, verdict.by, verdict.is_error = CAUGHT, result.end, True
        return None


def are_equal_losses(
    now: Mapping[str, Sequence[Sequence[float]]], then: Mapping[str, Sequence[Sequence[float]]]
) -> bool:
    """Return whether the losses in float64 of every case are equal in every shape; none is a failure."""
    return all(
        before and np.shape(after) == np.shape(before) and np.allclose(after, before, _EXACT, 0.0)
        for name in then
        for after, before in zip(now[name], then[name], strict=True)
    )


def _similar(name: str) -> str:
    """Return a case of the same defconfig whose checks have been timed."""
    return next(known for known in CASES if known.split("/")[0] == name.split("/")[0])


def _case(name: str) -> TrialCase:
    defconfig, _, slug = name.partition("/")
    return CASES.get(name) or TrialCase(defconfig, slug)


def _limit(seconds: float) -> float:
    return max(_MIN_LIMIT_SECONDS, _SLOWDOWN * seconds)
