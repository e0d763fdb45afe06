"""Results of checks, and their reports: a table for people, and JSON for programs.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one case."""

    findings: Sequence[CheckFinding]
    seconds: float
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


def to_json(
    cases: CheckPlan,
    checks: Sequence[Check],
    reports: Sequence[CaseReport],
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """Return the content of check.json.

    ``command`` repeats a check if the names of step and check are appended.
    """
    steps = []
    for case, report in zip(cases.chosen, reports, strict=True):
        results = {
            name: {
                "state": result.state,
                "seconds": round(result.seconds, 4),
                "findings": [
                    {
                        "property": finding.property,
                        "expected": finding.expected,
                        "found": finding.found,
                    }
                    for finding in result.findings
                ],
                "repeat": repeat_command(command, cases, case, name),
                **({"facts": dict(result.facts)} if result.facts else {}),
            }
            for name, result in report.results.items()
        }
        steps.append({"label": case.label, "results": results})
    passed, failed = totals(reports)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": cases.study,
        "checks": [check.name for check in checks],
        "notes": _notes(cases),
        "steps": steps,
        "passed": passed,
        "failed": failed,
        "seconds": round(seconds, 3),
    }


def to_junit(cases: CheckPlan, reports: Sequence[CaseReport], seconds: float) -> bytes:
    """Return the results as JUnit XML: a test case for each check of each step.

    Absent data is a skipped test.
    """
    tests = [
        (case, name, result)
        for case, report in zip(cases.chosen, reports, strict=True)
        for name, result in report.results.items()
    ]
    states = [result.state for _, _, result in tests]
    counts = {"tests": len(tests), "failures": states.count("failed"), "errors": 0}
    counts["skipped"] = states.count("absent")
    figures = {name: str(count) for name, count in counts.items()} | {"time": f"{seconds:.3f}"}
    suite = ElementTree.Element("testsuite", {"name": f"make check {cases.study}", **figures})
    for case, name, result in tests:
        test = ElementTree.SubElement(
            suite, "testcase", classname=case.label, name=name, time=f"{result.seconds:.3f}"
        )
        for finding in result.findings:
            kind = "skipped" if result.state == "absent" else "failure"
            message = printable(f"expected {finding.expected}; found: {finding.found}")
            ElementTree.SubElement(test, kind, message=message, type=finding.property)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"


def to_text(
    cases: CheckPlan,
    checks: Sequence[Check],
    reports: Sequence[CaseReport],
    command: str,
    seconds: float,
    columns: int | None = None,
) -> str:
    """Return a table of seconds, a line for each finding, and the totals as the last line.

    If the table is wider than ``columns``, it counts the checks of each step instead.
    """
    names = [check.name for check in checks]
    width = max(len(case.label) for case in cases.chosen)
    table = ["  ".join([f"{'step':<{width}}", *(f"{name:>6}" for name in names)])]
    for case, report in zip(cases.chosen, reports, strict=True):
        cells = [_cell(report.results.get(name), max(6, len(name))) for name in names]
        table.append("  ".join([f"{case.label:<{width}}", *cells]))
    unit = "seconds of each check"
    if columns is not None and len(table[0]) > columns:
        table, unit = _counts(cases, reports), f"V=1 shows the {unit}"
    notes = [*_notes(cases), *_failures(cases, reports, command)]
    passed, failed = totals(reports)
    covered = sum(any(not CHECKS[name].every for name in r.results) for r in reports)
    if 0 < covered < len(reports):
        notes.append(f"costly checks: {covered} of {len(reports)} steps, with every option of all")
    notes += [f"{unit}; {seconds:.1f} s in all", f"{passed} passed, {failed} failed"]
    table += _full_size(cases, reports, width, columns)
    return "\n".join([*table, folded("\n".join(notes), columns, "        ")]) + "\n"


def _counts(cases: CheckPlan, reports: Sequence[CaseReport]) -> list[str]:
    """Return the table of passed, failed and absent checks of each step."""
    states = ("passed", "failed", "absent")
    rows: list[tuple[str, ...]] = [("step", *states, "seconds", "slowest check")]
    for case, report in zip(cases.chosen, reports, strict=True):
        found = [result.state for result in report.results.values()]
        seconds = {name: result.seconds for name, result in report.results.items()}
        slowest = max(seconds, key=seconds.__getitem__, default="-")
        counts = (str(found.count(state)) for state in states)
        rows.append((case.label, *counts, f"{sum(seconds.values()):.1f}", slowest))
    return text_lines(rows, right=range(1, 5))


def _full_size(
    cases: CheckPlan, reports: Sequence[CaseReport], width: int, columns: int | None
) -> list[str]:
    """Return the table of full-size predictions; steps with equal rows share a line."""
    labels_by_row: dict[tuple[str, ...], list[str]] = {}
    heading: tuple[str, ...] = ()
    for case, report in zip(cases.chosen, reports, strict=True):
        if "full_size" in report.results and (facts := report.results["full_size"].facts):
            heading = (f"full size, {facts['target']}", *facts["row"])
            labels_by_row.setdefault(tuple(facts["row"].values()), []).append(case.label)
    if not labels_by_row:
        return []
    suffixes = {
        row: f" +{len(labels) - 1}" if labels[1:] else "" for row, labels in labels_by_row.items()
    }
    rows = [(labels[0] + suffixes[row], *row) for row, labels in labels_by_row.items()]
    table = dict(zip(heading, zip(*rows, strict=True), strict=True))
    lines = fitting_rows(table, heading, columns)
    width = width if columns is None else 0
    return ["", *text_lines(lines, right=range(1, len(lines[0])), min_width=width), ""]


def _notes(cases: CheckPlan) -> list[str]:
    """Return notes on the configured sizes, which small forms do not show."""
    return note_lines((case.label, case.config) for case in cases.chosen if case.config)


def totals(reports: Sequence[CaseReport]) -> tuple[int, int]:
    """Return the numbers of passed and failed checks; absent data counts as neither."""
    states = [result.state for report in reports for result in report.results.values()]
    return states.count("passed"), states.count("failed")


def repeat_command(command: str, cases: CheckPlan, case: CheckCase, name: str) -> str:
    """Return the command that repeats one check of one case."""
    steps = "" if cases.study == "single" else f" STEPS={case.selector}"
    return f"{command}{steps} CHECKS={name}"


def _failures(cases: CheckPlan, reports: Sequence[CaseReport], command: str) -> list[str]:
    """Return a line for each finding: step, check, expected, found and the command to repeat it.

    Equal absences share a line. Only the first findings of a check are listed; check.json has all.
    """
    lines: dict[str, None] = {}
    for case, report in zip(cases.chosen, reports, strict=True):
        for name, result in report.results.items():
            for finding in result.findings[:_MAX_FINDINGS_SHOWN]:
                if finding.absent:
                    lines[f"{_tag('absent')}  {name}: {finding.found}"] = None
                    continue
                repeat = repeat_command(command, cases, case, name)
                lines[
                    f"{_tag('failed')}  {case.label}  {name}: expected {finding.expected}; "
                    f"found: {finding.found}  [{repeat}]"
                ] = None
            if (hidden := len(result.findings) - _MAX_FINDINGS_SHOWN) > 0:
                lines[f"      {case.label}  {name}: {hidden} more in check.json"] = None
    return list(lines)


def _cell(result: CheckResult | None, width: int) -> str:
    """Return the seconds of a passed check, the tag of any other result, or a hyphen for none."""
    if result is None:
        return f"{'-':>{width}}"
    if result.state == "passed":
        return f"{result.seconds:>{width}.2f}"
    return " " * (width - len(_TAGS[result.state])) + _tag(result.state)


def _tag(state: str) -> str:
    return painted(_TAGS[state], _RED if state == "failed" else _YELLOW)
