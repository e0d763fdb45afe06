"""Results of checks, and their reports: a table for people, and JSON and XML for programs.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from gpt2.check import CHECKS, Check
from gpt2.check.cases import CheckCase, CheckPlan
from gpt2.check.distinct import Fingerprint
from gpt2.check.finding import CheckFinding
from gpt2.study.notes import note_lines
from lib.console import folded, painted
from lib.errors import printable
from lib.report.render import fitting_rows, text_lines

SCHEMA_VERSION = 1
# Findings shown for one check of one step; a wrong logit makes every gradient wrong.
_MAX_FINDINGS_SHOWN = 4
_RED, _YELLOW = "31", "33"
_TAGS = {"failed": "FAIL", "absent": "ABSENT"}
_STATES = ("passed", "failed", "absent")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one case."""

    findings: Sequence[CheckFinding]
    seconds: float = 0.0
    # Additional results of the check.
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """Return passed, failed or absent."""
        if all(finding.absent for finding in self.findings):
            return "absent" if self.findings else "passed"
        return "failed"


@dataclass
class CaseReport:
    """All results of one case."""

    slug: str
    results: dict[str, CheckResult] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None


class CheckReport:
    """The results of the chosen cases, whose reports are in their order.

    ``command`` repeats a check if the names of step and check are appended.
    """

    def __init__(
        self,
        cases: CheckPlan,
        checks: Sequence[Check],
        reports: Sequence[CaseReport],
        command: str = "make check",
        seconds: float = 0.0,
    ) -> None:
        self.study = cases.study
        self.names = [check.name for check in checks]
        self.rows = list(zip(cases.chosen, (r.results for r in reports), strict=True))
        self.command, self.seconds = command, seconds
        self.results = [(case, *pair) for case, found in self.rows for pair in found.items()]
        # Absent data counts as neither.
        states = [result.state for _, _, result in self.results]
        self.counts = {state: states.count(state) for state in _STATES}
        # On the configured sizes, which small forms do not show.
        self.notes = note_lines((case.label, case.config) for case, _ in self.rows if case.config)

    def _repeat(self, case: CheckCase, name: str) -> str:
        """Return the command that repeats one check of one case."""
        steps = "" if self.study == "single" else f" STEPS={case.selector}"
        return f"{self.command}{steps} CHECKS={name}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of check.json."""
        steps = [
            {"label": case.label, "results": {n: self._entry(case, n, r) for n, r in found.items()}}
            for case, found in self.rows
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "study": self.study,
            "checks": self.names,
            "notes": self.notes,
            "steps": steps,
            "passed": self.counts["passed"],
            "failed": self.counts["failed"],
            "seconds": round(self.seconds, 3),
        }

    def _entry(self, case: CheckCase, name: str, result: CheckResult) -> dict[str, Any]:
        findings = [asdict(finding) for finding in result.findings]
        return {
            "state": result.state,
            "seconds": round(result.seconds, 4),
            "findings": [{k: f[k] for k in ("property", "expected", "found")} for f in findings],
            "repeat": self._repeat(case, name),
            **({"facts": dict(result.facts)} if result.facts else {}),
        }

    def to_junit(self) -> bytes:
        """Return JUnit XML: a test for each check of each step, a skipped one for absent data."""
        counts = {"tests": len(self.results), "failures": self.counts["failed"], "errors": 0}
        counts["skipped"] = self.counts["absent"]
        figures = {name: str(count) for name, count in counts.items()}
        figures |= {"name": f"make check {self.study}", "time": f"{self.seconds:.3f}"}
        suite = ElementTree.Element("testsuite", figures)
        for case, name, result in self.results:
            test = ElementTree.SubElement(
                suite, "testcase", classname=case.label, name=name, time=f"{result.seconds:.3f}"
            )
            for finding in result.findings:
                kind = "skipped" if result.state == "absent" else "failure"
                message = printable(f"expected {finding.expected}; found: {finding.found}")
                ElementTree.SubElement(test, kind, message=message, type=finding.property)
        return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"

    def to_text(self, columns: int | None = None) -> str:
        """Return a table of seconds, a line for each finding, and the totals as the last line.

        If the table is wider than ``columns``, it counts the checks of each step instead.
        """
        width, names = max(len(case.label) for case, _ in self.rows), self.names
        table = ["  ".join([f"{'step':<{width}}", *(f"{name:>6}" for name in names)])]
        for case, found in self.rows:
            cells = [_cell(found.get(name), max(6, len(name))) for name in names]
            table.append("  ".join([f"{case.label:<{width}}", *cells]))
        unit = "seconds of each check"
        if columns is not None and len(table[0]) > columns:
            table, unit = self._counts_by_step(), f"V=1 shows the {unit}"
        notes = [*self.notes, *self._failures()]
        covered = sum(any(not CHECKS[name].every for name in found) for _, found in self.rows)
        if 0 < covered < (steps := len(self.rows)):
            notes.append(f"costly checks: {covered} of {steps} steps, with every option of all")
        notes.append(f"{unit}; {self.seconds:.1f} s in all")
        notes.append(f"{self.counts['passed']} passed, {self.counts['failed']} failed")
        table += self._full_size(width, columns)
        return "\n".join([*table, folded("\n".join(notes), columns, "        ")]) + "\n"

    def _counts_by_step(self) -> list[str]:
        """Return the table of passed, failed and absent checks of each step."""
        rows: list[tuple[str, ...]] = [("step", *_STATES, "seconds", "slowest check")]
        for case, results in self.rows:
            states = [result.state for result in results.values()]
            seconds = {name: result.seconds for name, result in results.items()}
            slowest = max(seconds, key=seconds.__getitem__, default="-")
            counts = (str(states.count(state)) for state in _STATES)
            rows.append((case.label, *counts, f"{sum(seconds.values()):.1f}", slowest))
        return text_lines(rows, right=range(1, 5))

    def _full_size(self, width: int, columns: int | None) -> list[str]:
        """Return the table of full-size predictions; steps with equal rows share a line."""
        labels_by_row: dict[tuple[str, ...], list[str]] = {}
        heading: tuple[str, ...] = ()
        for case, name, result in self.results:
            if name == "full_size" and (facts := result.facts):
                heading = (f"full size, {facts['target']}", *facts["row"])
                labels_by_row.setdefault(tuple(facts["row"].values()), []).append(case.label)
        if not labels_by_row:
            return []
        rows = [
            (labels[0] + (f" +{len(labels) - 1}" if labels[1:] else ""), *row)
            for row, labels in labels_by_row.items()
        ]
        table = dict(zip(heading, zip(*rows, strict=True), strict=True))
        lines = fitting_rows(table, heading, columns)
        width = width if columns is None else 0
        return ["", *text_lines(lines, right=range(1, len(lines[0])), min_width=width), ""]

    def _failures(self) -> list[str]:
        """Return a line for each of the first findings of a check; equal absences share a line."""
        lines: dict[str, None] = {}
        for case, name, result in self.results:
            for finding in result.findings[:_MAX_FINDINGS_SHOWN]:
                if finding.absent:
                    lines[f"{_tag('absent')}  {name}: {finding.found}"] = None
                    continue
                lines[
                    f"{_tag('failed')}  {case.label}  {name}: expected {finding.expected}; "
                    f"found: {finding.found}  [{self._repeat(case, name)}]"
                ] = None
            if (hidden := len(result.findings) - _MAX_FINDINGS_SHOWN) > 0:
                lines[f"      {case.label}  {name}: {hidden} more in check.json"] = None
        return list(lines)


def _cell(result: CheckResult | None, width: int) -> str:
    """Return the seconds of a passed check, the tag of any other result, or a hyphen for none."""
    if result is None or result.state == "passed":
        return f"{'-' if result is None else f'{result.seconds:.2f}':>{width}}"
    return " " * (width - len(_TAGS[result.state])) + _tag(result.state)


def _tag(state: str) -> str:
    return painted(_TAGS[state], _RED if state == "failed" else _YELLOW)
