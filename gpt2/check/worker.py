"""Execution of checks in one process, which loads torch.

A worker takes the next case after finishing one. Checks that compare steps with each other run at
the end, in the process that collects the fingerprints of all steps.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpt2.check import Check, take_ticket
from gpt2.check.budget_checks import check_budgeted
from gpt2.check.cases import CheckCase, CheckJob, check_resolve
from gpt2.check.config_checks import check_declared, check_full_size
from gpt2.check.context import CheckContext, ErrorCapture
from gpt2.check.device_checks import check_device
from gpt2.check.evaluation_checks import check_evaluated
from gpt2.check.finding import CheckFinding
from gpt2.check.generation_checks import check_decode
from gpt2.check.long_checks import check_long
from gpt2.check.model_checks import (
    check_causal,
    check_distinct,
    check_gradients,
    check_reference,
)
from gpt2.check.pairing_checks import check_paired
from gpt2.check.precision_checks import check_precise
from gpt2.check.process_checks import check_data, check_parallel, check_reload
from gpt2.check.report import CaseReport, CheckResult
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import check_optimized, check_pruned
from lib.env.gpu import Gpu

CheckFunction = Callable[[StepUnderTest], list[CheckFinding]]
# Every check but resolve, which needs no step that resolves.
CHECK_FUNCTIONS: Mapping[str, CheckFunction] = {
    "full_size": check_full_size,
    "distinct": check_distinct,
    "declared": check_declared,
    "gradients": check_gradients,
    "causal": check_causal,
    "reference": check_reference,
    "decode": check_decode,
    "long": check_long,
    "reload": check_reload,
    "evaluated": check_evaluated,
    "precise": check_precise,
    "optimized": check_optimized,
    "pruned": check_pruned,
    "budgeted": check_budgeted,
    "paired": check_paired,
    "parallel": check_parallel,
    "data": check_data,
    "device": check_device,
}
_COMPLETES = "the check completes"
# New objects between two garbage collections.
_GC_THRESHOLD = 10_000


def run_in_process(
    case: CheckCase,
    checks: Sequence[Check],
    others: Mapping[str, CheckCase],
    build_dir: Path = Path(),
) -> dict[str, CheckResult]:
    """Run those of ``checks`` that apply to a case in this process, with its current code."""
    results = {}
    for check in checks:
        if check.name == "resolve":
            results[check.name] = CheckResult(check_resolve(case), 0.0)
    if case.config is None:
        return results
    with CheckContext(build_dir) as context:
        subject = StepUnderTest(case, context, others)
        for check in checks:
            if check.name != "resolve" and check.applies_to(case.config):
                results[check.name] = _run_check(check, subject)
    return results


def run_jobs(
    jobs: Sequence[CheckJob],
    others: Mapping[str, CheckCase],
    build_dir: Path,
    tickets: Path,
    gpu: Gpu | None,
    local: Gpu | None,
) -> Iterator[CaseReport]:
    """Run the jobs that no other worker has taken; yields their reports. Runs in a worker."""
    # The objects of imported modules remain: a full collection would visit all of them. The default
    # threshold starts a collection in every few operations.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    with CheckContext(build_dir, gpu, local, tickets) as context:
        # Fork before this process loads or computes anything that the peer should not inherit.
        if any(check.name in ("reload", "parallel") for job in jobs for check in job.checks):
            context.peer.submit(abs, 0)
        for number, job in enumerate(jobs):
            if not take_ticket(tickets / str(number)):
                continue
            subject, report = StepUnderTest(job.case, context, others), CaseReport(job.case.slug)
            if job.fingerprint:
                started = time.perf_counter()
                with ErrorCapture() as outcome:
                    report.fingerprint = subject.fingerprint
                findings = _errors(outcome)
                report.results["distinct"] = CheckResult(findings, time.perf_counter() - started)
            for check in job.checks:
                report.results[check.name] = _run_check(check, subject)
            yield report


def _run_check(check: Check, subject: StepUnderTest) -> CheckResult:
    """Return the result of a check; an error of the checked code is a finding."""
    started = time.perf_counter()
    findings: Sequence[CheckFinding] = []
    with ErrorCapture() as outcome:
        findings = CHECK_FUNCTIONS[check.name](subject)
    findings = _errors(outcome) or findings
    return CheckResult(findings, time.perf_counter() - started, subject.facts.get(check.name, {}))


def _errors(outcome: ErrorCapture) -> list[CheckFinding]:
    return [CheckFinding(outcome.code, _COMPLETES, outcome.text)] if outcome.code else []
