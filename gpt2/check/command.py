"""The ``make check`` command, from its variables to its exit code; imports no torch."""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt2.check import CHECKS, Check, cases, select
from gpt2.check.cases import CheckCase, CheckFinding, CheckPlan, config_layers_to_check, plan_cases
from gpt2.check.context import ErrorCapture
from gpt2.check.distinct import Fingerprint, find_duplicates
from gpt2.planning.view import note_lines
from gpt2.running import PRELOADED_MODULES
from lib.env.gpu import Gpu, find_gpu, gpu_with_memory, usable_cores
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import write_json
from lib.runner.local import LocalExecutor

# Execution of checks, in this process or in workers that have torch loaded.
#
# A worker takes the next case after finishing one. Checks that compare steps with each other run at
# the end, in the process that collects the fingerprints of all steps.


# Modules that workers share instead of importing them again.
CHECK_MODULES = (
    *PRELOADED_MODULES,
    "gpt2.check.subject",
    *dict.fromkeys(check.module for check in CHECKS.values()),
)
_COMPLETES = "the check completes"


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


def run_all(
    cases: CheckPlan, checks: Sequence[Check], build_dir: Path, gpu: Gpu | None = None
) -> list[CaseReport]:
    """Check every chosen case in workers, one per core. Return reports in the order of the cases.

    ``gpu`` is the GPU named by the user, if any, whose memory the configured size must fit.
    """
    jobs = _jobs(cases, checks)
    reports = {job.slug: CaseReport(job.slug) for job in jobs}
    if jobs:
        executor = LocalExecutor(CHECK_MODULES, {"OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
            others = {case.slug: case for case in cases.every}
            arguments = (jobs, others, build_dir, Path(tickets), gpu)
            workers = min(usable_cores(), len(jobs))
            for report in executor.call_many(run_jobs, [arguments] * workers):
                reports[report.slug] = report
    return [_complete(case, cases, checks, reports) for case in cases.chosen]


def run_in_process(
    case: CheckCase,
    checks: Sequence[Check],
    others: Mapping[str, CheckCase],
    build_dir: Path = Path(),
) -> dict[str, CheckResult]:
    """Check one case in this process, with its current code."""
    from gpt2.check.context import CheckContext
    from gpt2.check.subject import StepUnderTest

    results = {check.name: _resolve(case) for check in checks if check.name == "resolve"}
    if case.config is None:
        return results
    with CheckContext(build_dir) as workshop:
        subject = StepUnderTest(case, workshop, others)
        for check in checks:
            if check.name != "resolve":
                results[check.name] = _run_check(check, subject)
    return results


@dataclass(frozen=True)
class CheckJob:
    """Work on one case, for a worker."""

    case: CheckCase
    checks: Sequence[Check]
    fingerprint: bool

    @property
    def slug(self) -> str:
        """Return the slug of the case."""
        return self.case.slug


def run_jobs(
    jobs: Sequence[CheckJob],
    others: Mapping[str, CheckCase],
    build_dir: Path,
    tickets: Path,
    gpu: Gpu | None,
) -> Iterator[CaseReport]:
    """Run the jobs that no other worker has taken; yields their reports. Runs in a worker."""
    from gpt2.check.context import CheckContext
    from gpt2.check.subject import StepUnderTest

    with CheckContext(build_dir, gpu) as workshop:
        # Fork before this process loads or computes anything that the partner should not inherit.
        if any(check.name in ("reload", "parallel") for job in jobs for check in job.checks):
            _ = workshop.partner
        for number, job in enumerate(jobs):
            if not _take_ticket(tickets / str(number)):
                continue
            subject, report = StepUnderTest(job.case, workshop, others), CaseReport(job.slug)
            if job.fingerprint:
                started = time.perf_counter()
                with ErrorCapture() as outcome:
                    report.fingerprint = subject.fingerprint
                findings = _errors(outcome)
                report.results["distinct"] = CheckResult(findings, time.perf_counter() - started)
            for check in job.checks:
                report.results[check.name] = _run_check(check, subject)
            yield report


def _jobs(cases: CheckPlan, checks: Sequence[Check]) -> list[CheckJob]:
    """Return jobs for chosen cases, and for all others if their fingerprints are needed.

    Cases with the same data share one check of the data.
    """
    chosen = {case.slug for case in cases.chosen}
    joint = any(check.joint for check in checks)
    checked_data: set[Any] = set()
    jobs = []
    for case in cases.every:
        if case.config is None or not (joint or case.slug in chosen):
            continue
        own_checks = [c for c in checks if not c.joint and c.name != "resolve"]
        own_checks = own_checks if case.slug in chosen else []
        if _data_key(case) in checked_data:
            own_checks = [check for check in own_checks if check.name != "data"]
        elif own_checks:
            checked_data.add(_data_key(case))
        if own_checks or joint:
            jobs.append(CheckJob(case, own_checks, joint))
    return jobs


def _complete(
    case: CheckCase, cases: CheckPlan, checks: Sequence[Check], reports: Mapping[str, CaseReport]
) -> CaseReport:
    """Return a case's report in the order of the checks, with results from other processes."""
    results = dict(reports[case.slug].results) if case.slug in reports else {}
    fingerprints = {slug: r.fingerprint for slug, r in reports.items() if r.fingerprint}
    if case.slug in fingerprints and any(check.joint for check in checks):
        started = time.perf_counter()
        findings = find_duplicates(case.slug, fingerprints)
        seconds = results["distinct"].seconds + time.perf_counter() - started
        results["distinct"] = CheckResult(findings, seconds)
    ordered = {}
    for check in checks:
        if check.name == "resolve":
            ordered["resolve"] = _resolve(case)
        elif check.name in results:
            ordered[check.name] = results[check.name]
        elif check.name == "data" and case.config is not None:
            ordered["data"] = _shared_data(case, cases, reports)
    return CaseReport(case.slug, ordered)


def _shared_data(
    case: CheckCase, cases: CheckPlan, reports: Mapping[str, CaseReport]
) -> CheckResult:
    """Return the data result of the first case with the same data."""
    (shared,) = [
        reports[other.slug].results["data"]
        for other in cases.every
        if other.slug in reports
        and "data" in reports[other.slug].results
        and _data_key(other) == _data_key(case)
    ]
    return CheckResult(shared.findings, 0.0)


def _data_key(case: CheckCase) -> Any:
    assert case.config is not None
    shape = case.config.model.shape
    return case.config.data, shape.vocab_size, shape.block_size


def _resolve(case: CheckCase) -> CheckResult:
    started = time.perf_counter()
    return CheckResult(cases.check_resolve(case), time.perf_counter() - started)


def _run_check(check: Check, subject: Any) -> CheckResult:
    """Return the result of a check; an error of the checked code is a finding."""
    started = time.perf_counter()
    findings: Sequence[CheckFinding] = []
    with ErrorCapture() as outcome:
        findings = check.function(subject)
    findings = _errors(outcome) or findings
    return CheckResult(findings, time.perf_counter() - started, subject.facts.get(check.name, {}))


def _errors(outcome: ErrorCapture) -> list[CheckFinding]:
    return [CheckFinding(outcome.code, _COMPLETES, outcome.text)] if outcome.code else []


def _take_ticket(ticket: Path) -> bool:
    """Return whether this process is the first to take the ticket.

    After an interrupt the folder of tickets is gone.
    """
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        return False
    return True


# Reports of checks, as a table for people and as JSON for programs.


SCHEMA_VERSION = 1
# Findings shown for one check of one step; a wrong logit makes every gradient wrong.
_MAX_FINDINGS_SHOWN = 4
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
_TAGS = {"failed": "FAIL", "absent": "ABSENT"}


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


def to_text(
    cases: CheckPlan,
    checks: Sequence[Check],
    reports: Sequence[CaseReport],
    command: str,
    seconds: float,
) -> str:
    """Return a table of seconds, a line for each finding, and the totals as the last line."""
    names = [check.name for check in checks]
    width = max(len(case.label) for case in cases.chosen)
    lines = ["  ".join([f"{'step':<{width}}", *(f"{name:>6}" for name in names)])]
    for case, report in zip(cases.chosen, reports, strict=True):
        cells = [_cell(report.results.get(name), max(6, len(name))) for name in names]
        lines.append("  ".join([f"{case.label:<{width}}", *cells]))
    lines += _full_size(cases, reports, width)
    lines += _notes(cases)
    lines += _failures(cases, reports, command)
    passed, failed = totals(reports)
    lines += [f"seconds of each check; {seconds:.1f} s in all", f"{passed} passed, {failed} failed"]
    return "\n".join(lines) + "\n"


def _full_size(cases: CheckPlan, reports: Sequence[CaseReport], width: int) -> list[str]:
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
    lines = [heading, *((labels[0] + suffixes[row], *row) for row, labels in labels_by_row.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    names = [line[0].ljust(max(widths[0], width)) for line in lines]
    cells = [[c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)] for line in lines]
    return ["", *("  ".join([n, *c]) for n, c in zip(names, cells, strict=True)), ""]


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
    tag = _TAGS[state]
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stdout.isatty():
        return tag
    return f"{_RED if state == 'failed' else _YELLOW}{tag}{_PLAIN}"


RECORD_FILE = "check.json"


@dataclass(frozen=True)
class CheckRequest:
    """Arguments of ``make check``; an empty string selects everything."""

    build_dir: Path
    steps: str = ""
    checks: str = ""
    defconfig: str = ""
    # "" or require
    data: str = ""
    # Name in the GPU table, or the memory in GiB of a GPU that the table lacks.
    gpu: str = ""
    gpu_memory_gb: str = ""
    fast: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.data not in ("", "require"):
            problem = Problem(
                f"invalid value (expected require, got {self.data!r})",
                "DATA",
                "type: make check DATA=require",
                code="usage.invalid-argument",
            )
            raise ConfigError(problem)

    @property
    def target(self) -> Gpu | None:
        """Return the GPU that was named, or None.

        Raises ConfigError if the GPU is unknown or its memory is invalid.
        """
        if not self.gpu_memory_gb:
            return find_gpu(self.gpu) if self.gpu else None
        if self.gpu:
            problem = Problem(
                "cannot be combined with GPU=", "CHECK_GPU_MEMORY_GB", code="usage.conflict"
            )
            raise ConfigError(problem)
        try:
            memory_gib = float(self.gpu_memory_gb)
        except ValueError:
            memory_gib = math.nan
        if not 0 < memory_gib < math.inf:
            what = f"invalid value (expected a number > 0, got {self.gpu_memory_gb!r})"
            raise ConfigError(Problem(what, "CHECK_GPU_MEMORY_GB", code="usage.invalid-argument"))
        return gpu_with_memory(memory_gib)


def check(request: CheckRequest) -> tuple[int, str]:
    """Check a configuration. Return the exit code and the text for stdout."""
    layers = config_layers_to_check(request.build_dir, request.defconfig)
    return check_and_report(plan_cases(layers, request.steps), request)


def check_and_report(cases: CheckPlan, request: CheckRequest) -> tuple[int, str]:
    """Check the chosen cases and write ``check.json`` into the build folder.

    Returns the exit code and the text for stdout.
    """
    started = time.perf_counter()
    checks = select(request.checks, fast=request.fast)
    reports = run_all(cases, checks, request.build_dir, request.target)
    if request.data == "require":
        reports = [_require_data(each) for each in reports]
    variables = {
        "DEFCONFIG": request.defconfig,
        "DATA": request.data,
        "GPU": request.gpu,
        "CHECK_GPU_MEMORY_GB": request.gpu_memory_gb,
    }
    command = " ".join(
        ["make check", *(f"{name}={value}" for name, value in variables.items() if value)]
    )
    seconds = time.perf_counter() - started
    record = to_json(cases, checks, reports, command, seconds)
    request.build_dir.mkdir(parents=True, exist_ok=True)
    write_json(request.build_dir / RECORD_FILE, record)
    code = EXIT_FAILED if record["failed"] else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, to_text(cases, checks, reports, command, seconds)


def _require_data(report: CaseReport) -> CaseReport:
    """Return the report with absent data turned into a failure."""
    results = {
        name: CheckResult([replace(f, absent=False) for f in result.findings], result.seconds)
        for name, result in report.results.items()
    }
    return CaseReport(report.slug, results)
