"""Execution of checks, in this process or in workers that have torch loaded.

A worker takes the next case after finishing one. Checks that compare steps with each other run at
the end, in the process that collects the fingerprints of all steps.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2.check import Check, resolve
from gpt2.check.cases import Case, Cases
from gpt2.check.distinct import Fingerprint, compare
from gpt2.check.finding import Finding
from gpt2.check.partner import Outcome
from lib.machine.devices import usable_cores
from lib.machine.gpus import Gpu
from lib.runner.pool import Pool

# Modules that workers share instead of importing them again.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed",
    "gpt2.train",
    "gpt2.check.subject",
    *(
        f"gpt2.check.{name}"
        for name in ("causal", "declared", "isolated", "data", "decode", "entropy", "field")
    ),
    *(
        f"gpt2.check.{name}"
        for name in ("full_size", "parallel", "pruned", "reference", "reload", "repeat")
    ),
)
_COMPLETES = "the check completes"


@dataclass(frozen=True)
class Result:
    """The result of one check of one case."""

    findings: Sequence[Finding]
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
class Report:
    """All results of one case."""

    slug: str
    results: dict[str, Result] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None


def run_all(
    cases: Cases, checks: Sequence[Check], build_dir: Path, gpu: Gpu | None = None
) -> list[Report]:
    """Check every chosen case in workers, one per core. Return reports in the order of the cases.

    ``gpu`` is the GPU named by the user, if any, whose memory the configured size must fit.
    """
    jobs = _jobs(cases, checks)
    reports = {job.slug: Report(job.slug) for job in jobs}
    if jobs:
        pool = Pool(PRELOAD, {"OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
            others = {case.slug: case for case in cases.every}
            arguments = (jobs, others, build_dir, Path(tickets), gpu)
            workers = min(usable_cores(), len(jobs))
            for report in pool.gather("gpt2.check.run:work", [arguments] * workers):
                reports[report.slug] = report
    return [_complete(case, cases, checks, reports) for case in cases.chosen]


def run_here(
    case: Case, checks: Sequence[Check], others: Mapping[str, Case], build_dir: Path = Path()
) -> dict[str, Result]:
    """Check one case in this process, with its current code."""
    from gpt2.check.subject import Subject
    from gpt2.check.workshop import Workshop

    results = {check.name: _resolve(case) for check in checks if check.name == "resolve"}
    if case.config is None:
        return results
    with Workshop(build_dir) as workshop:
        subject = Subject(case, workshop, others)
        for check in checks:
            if check.name != "resolve":
                results[check.name] = _run_check(check, subject)
    return results


@dataclass(frozen=True)
class Job:
    """Work on one case, for a worker."""

    case: Case
    checks: Sequence[Check]
    fingerprint: bool

    @property
    def slug(self) -> str:
        """Return the slug of the case."""
        return self.case.slug


def work(
    jobs: Sequence[Job],
    others: Mapping[str, Case],
    build_dir: Path,
    tickets: Path,
    gpu: Gpu | None,
) -> Iterator[Report]:
    """Run the jobs that no other worker has taken; yields their reports. Runs in a worker."""
    from gpt2.check.subject import Subject
    from gpt2.check.workshop import Workshop

    with Workshop(build_dir, gpu) as workshop:
        # Fork before this process loads or computes anything that the partner should not inherit.
        if any(check.name in ("reload", "parallel") for job in jobs for check in job.checks):
            _ = workshop.partner
        for number, job in enumerate(jobs):
            if not _take_ticket(tickets / str(number)):
                continue
            subject, report = Subject(job.case, workshop, others), Report(job.slug)
            if job.fingerprint:
                started = time.perf_counter()
                with Outcome() as outcome:
                    report.fingerprint = subject.fingerprint
                findings = _errors(outcome)
                report.results["distinct"] = Result(findings, time.perf_counter() - started)
            for check in job.checks:
                report.results[check.name] = _run_check(check, subject)
            yield report


def _jobs(cases: Cases, checks: Sequence[Check]) -> list[Job]:
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
            jobs.append(Job(case, own_checks, joint))
    return jobs


def _complete(
    case: Case, cases: Cases, checks: Sequence[Check], reports: Mapping[str, Report]
) -> Report:
    """Return a case's report in the order of the checks, with results from other processes."""
    results = dict(reports[case.slug].results) if case.slug in reports else {}
    fingerprints = {slug: r.fingerprint for slug, r in reports.items() if r.fingerprint}
    if case.slug in fingerprints and any(check.joint for check in checks):
        started = time.perf_counter()
        findings = compare(case.slug, fingerprints)
        seconds = results["distinct"].seconds + time.perf_counter() - started
        results["distinct"] = Result(findings, seconds)
    ordered = {}
    for check in checks:
        if check.name == "resolve":
            ordered["resolve"] = _resolve(case)
        elif check.name in results:
            ordered[check.name] = results[check.name]
        elif check.name == "data" and case.config is not None:
            ordered["data"] = _shared_data(case, cases, reports)
    return Report(case.slug, ordered)


def _shared_data(case: Case, cases: Cases, reports: Mapping[str, Report]) -> Result:
    """Return the data result of the first case with the same data."""
    (shared,) = [
        reports[other.slug].results["data"]
        for other in cases.every
        if other.slug in reports
        and "data" in reports[other.slug].results
        and _data_key(other) == _data_key(case)
    ]
    return Result(shared.findings, 0.0)


def _data_key(case: Case) -> Any:
    assert case.config is not None
    shape = case.config.model.shape
    return case.config.data, shape.vocab_size, shape.block_size


def _resolve(case: Case) -> Result:
    started = time.perf_counter()
    return Result(resolve.check(case), time.perf_counter() - started)


def _run_check(check: Check, subject: Any) -> Result:
    """Return the result of a check; an error of the checked code is a finding."""
    started = time.perf_counter()
    findings: Sequence[Finding] = []
    with Outcome() as outcome:
        findings = check.function(subject)
    findings = _errors(outcome) or findings
    return Result(findings, time.perf_counter() - started, subject.facts.get(check.name, {}))


def _errors(outcome: Outcome) -> list[Finding]:
    return [Finding(outcome.code, _COMPLETES, outcome.text)] if outcome.code else []


def _take_ticket(ticket: Path) -> bool:
    """Return whether this process is the first to take the ticket.

    After an interrupt the folder of tickets is gone.
    """
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        return False
    return True
