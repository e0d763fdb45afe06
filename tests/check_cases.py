"""Checks of one case in this process, with its current code, patched or not."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt2.check import Check
from gpt2.check.cases import CheckCase, CheckPlan
from gpt2.check.command import completed, plan_jobs
from gpt2.check.report import CaseReport
from gpt2.check.worker import run_jobs


def run_in_process(
    case: CheckCase,
    checks: Sequence[Check],
    others: Mapping[str, CheckCase],
    build_dir: Path = Path(),
) -> CaseReport:
    """Run those of ``checks`` that apply to a case of a study with ``others``."""
    every = {**others, case.slug: case}
    jobs = plan_jobs(CheckPlan("a test", list(every.values()), [case]), checks, [])
    with tempfile.TemporaryDirectory() as tickets:
        reports = {
            report.slug: report
            for report in run_jobs(jobs, every, build_dir, Path(tickets), None, None)
        }
    return completed(case, checks, reports)
