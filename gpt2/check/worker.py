"""Execution of checks in one process, which loads torch."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpt2.check.cases import CheckCase
from gpt2.check.config_checks import check_declared, check_full_size
from gpt2.check.context import CheckContext, ErrorCapture, take_ticket
from gpt2.check.device_checks import check_device
from gpt2.check.evaluation_checks import check_evaluated
from gpt2.check.finding import CheckFinding
from gpt2.check.generation_checks import check_decode
from gpt2.check.long_checks import check_long
from gpt2.check.model_checks import check_causal, check_gradients, check_reference
from gpt2.check.pairing_checks import check_paired
from gpt2.check.precision_checks import check_precise
from gpt2.check.process_checks import check_data, check_parallel, check_reload
from gpt2.check.report import CaseReport, CheckResult
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import check_budgeted, check_optimized, check_pruned
from lib.env.gpu import Gpu

# Every check but resolve, which needs no step that resolves, and distinct, which compares the
# fingerprints of several.
CHECK_FUNCTIONS: Mapping[str, Callable[[StepUnderTest], Iterable[CheckFinding]]] = {
    "full_size": check_full_size,
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


def run_jobs(
    jobs: Sequence[tuple[CheckCase, Sequence[str]]],
    others: Mapping[str, CheckCase],
    build_dir: Path,
    tickets: Path,
    gpu: Gpu | None,
    local: Gpu | None,
) -> Iterator[CaseReport]:
    """Run the jobs that no other worker has taken, and yield their reports with errors as findings."""
    # The objects of imported modules remain: a full collection would visit all of them. The default
    # threshold starts a collection in every few operations.
    gc.freeze()
    gc.set_threshold(10_000)
    with CheckContext(build_dir, gpu, local, tickets) as context:
        # Fork before this process loads or computes anything that the peer should not inherit.
        if any(name in ("reload", "parallel") for _, names in jobs for name in names):
            context.peer.submit(abs, 0)
        for number, (case, names) in enumerate(jobs):
            if not take_ticket(tickets / str(number)):
                continue
            subject, report = StepUnderTest(case, context, others), CaseReport(case.slug)
            for name in names:
                started, findings = time.perf_counter(), list[CheckFinding]()
                with ErrorCapture() as outcome:
                    if name == "distinct":
                        report.fingerprint = subject.fingerprint
                    else:
                        findings = list(CHECK_FUNCTIONS[name](subject))
                if outcome.code:
                    findings = [CheckFinding(outcome.code, "the check completes", outcome.text)]
                seconds, facts = time.perf_counter() - started, subject.facts.get(name, {})
                report.results[name] = CheckResult(findings, seconds, facts)
            yield report
