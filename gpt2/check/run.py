"""Checking all cases: in this process, or dealt out to workers that have torch loaded.

A worker takes the next case as soon as it has finished one. What compares steps with each other is
done at the end, by whoever has the fingerprints of all.
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

# What a worker would otherwise load for itself.
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
_ENDS = "the check runs to its end"


@dataclass(frozen=True)
class Result:
    """One check of one case."""

    findings: Sequence[Finding]
    seconds: float
    # What the check has to tell besides.
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """passed, failed or absent."""
        if all(finding.absent for finding in self.findings):
            return "absent" if self.findings else "passed"
        return "failed"


@dataclass
class Report:
    """Everything that was found out of one case."""

    slug: str
    results: dict[str, Result] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None


def run_all(
    cases: Cases, checks: Sequence[Check], build_dir: Path, gpu: Gpu | None = None
) -> list[Report]:
    """Check every chosen case in workers, one for each core; reports in the order of the cases.

    ``gpu`` is what the configured size has to fit, where the user named one.
    """
    jobs = _jobs(cases, checks)
    found = {job.slug: Report(job.slug) for job in jobs}
    if jobs:
        pool = Pool(PRELOAD, {"OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
            others = {case.slug: case for case in cases.every}
            arguments = (jobs, others, build_dir, Path(tickets), gpu)
            workers = min(usable_cores(), len(jobs))
            for report in pool.gather("gpt2.check.run:work", [arguments] * workers):
                found[report.slug] = report
    return [_complete(case, cases, checks, found) for case in cases.chosen]


def run_here(
    case: Case, checks: Sequence[Check], others: Mapping[str, Case], build_dir: Path = Path()
) -> dict[str, Result]:
    """Check one case in this process, with its code as it is now."""
    from gpt2.check.subject import Subject
    from gpt2.check.workshop import Workshop

    found = {check.name: _resolved(case) for check in checks if check.name == "resolve"}
    if case.config is None:
        return found
    with Workshop(build_dir) as workshop:
        subject = Subject(case, workshop, others)
        for check in checks:
            if check.name != "resolve":
                found[check.name] = _timed(check, subject)
    return found


@dataclass(frozen=True)
class Job:
    """What a worker is to do with a case."""

    case: Case
    checks: Sequence[Check]
    fingerprint: bool

    @property
    def slug(self) -> str:
        """The case's."""
        return self.case.slug


def work(
    jobs: Sequence[Job],
    others: Mapping[str, Case],
    build_dir: Path,
    tickets: Path,
    gpu: Gpu | None,
) -> Iterator[Report]:
    """In a worker: do jobs that no other worker has taken."""
    from gpt2.check.subject import Subject
    from gpt2.check.workshop import Workshop

    with Workshop(build_dir, gpu) as workshop:
        # Before anything is loaded or computed that it should not inherit.
        if any(check.name in ("reload", "parallel") for job in jobs for check in job.checks):
            _ = workshop.partner
        for number, job in enumerate(jobs):
            if not _taken(tickets / str(number)):
                continue
            subject, report = Subject(job.case, workshop, others), Report(job.slug)
            if job.fingerprint:
                started = time.perf_counter()
                with Outcome() as outcome:
                    report.fingerprint = subject.fingerprint
                findings = [Finding(_ENDS, outcome.text)] if outcome.text else []
                report.results["distinct"] = Result(findings, time.perf_counter() - started)
            for check in job.checks:
                report.results[check.name] = _timed(check, subject)
            yield report


def _jobs(cases: Cases, checks: Sequence[Check]) -> list[Job]:
    """Chosen cases with their checks; the others for their fingerprints, where these are needed.

    Cases of the same data share one look at it.
    """
    chosen = {case.slug for case in cases.chosen}
    joint = any(check.joint for check in checks)
    looked_at: set[Any] = set()
    jobs = []
    for case in cases.every:
        if case.config is None or not (joint or case.slug in chosen):
            continue
        own = [c for c in checks if not c.joint and c.name != "resolve"]
        own = own if case.slug in chosen else []
        if _data_key(case) in looked_at:
            own = [check for check in own if check.name != "data"]
        elif own:
            looked_at.add(_data_key(case))
        if own or joint:
            jobs.append(Job(case, own, joint))
    return jobs


def _complete(
    case: Case, cases: Cases, checks: Sequence[Check], found: Mapping[str, Report]
) -> Report:
    """A case's report with what other processes found out, in the order of the checks."""
    results = dict(found[case.slug].results) if case.slug in found else {}
    fingerprints = {slug: r.fingerprint for slug, r in found.items() if r.fingerprint}
    if case.slug in fingerprints and any(check.joint for check in checks):
        started = time.perf_counter()
        findings = compare(case.slug, fingerprints)
        seconds = results["distinct"].seconds + time.perf_counter() - started
        results["distinct"] = Result(findings, seconds)
    ordered = {}
    for check in checks:
        if check.name == "resolve":
            ordered["resolve"] = _resolved(case)
        elif check.name in results:
            ordered[check.name] = results[check.name]
        elif check.name == "data" and case.config is not None:
            ordered["data"] = _shared_data(case, cases, found)
    return Report(case.slug, ordered)


def _shared_data(case: Case, cases: Cases, found: Mapping[str, Report]) -> Result:
    """What the first case of the same data found."""
    (looked,) = [
        found[other.slug].results["data"]
        for other in cases.every
        if other.slug in found
        and "data" in found[other.slug].results
        and _data_key(other) == _data_key(case)
    ]
    return Result(looked.findings, 0.0)


def _data_key(case: Case) -> Any:
    assert case.config is not None
    shape = case.config.model.shape
    return case.config.data, shape.vocab_size, shape.block_size


def _resolved(case: Case) -> Result:
    started = time.perf_counter()
    return Result(resolve.check(case), time.perf_counter() - started)


def _timed(check: Check, subject: Any) -> Result:
    """A check's findings; an error of the checked code is one."""
    started = time.perf_counter()
    findings: Sequence[Finding] = []
    with Outcome() as outcome:
        findings = check.function(subject)
    if outcome.text:
        findings = [Finding(_ENDS, outcome.text)]
    return Result(findings, time.perf_counter() - started, subject.facts.get(check.name, {}))


def _taken(ticket: Path) -> bool:
    """Whether this process is the first to take the ticket; no tickets are left by an interrupt."""
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        return False
    return True
