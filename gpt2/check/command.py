"""The ``make check`` command, from its variables to its exit code; imports no torch."""

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.check import Check, select_for
from gpt2.check.cases import (
    CheckCase,
    CheckJob,
    CheckPlan,
    check_resolve,
    config_layers_to_check,
    plan_cases,
)
from gpt2.check.cover import components, covering_steps
from gpt2.check.distinct import find_duplicates
from gpt2.check.report import CaseReport, CheckResult, to_json, to_junit, to_text
from gpt2.study.arguments import settings_layers
from lib.config.layers import ConfigLayer
from lib.console import is_verbose, log, terminal_columns
from lib.env.gpu import NO_GPUS, Gpu, find_gpu, gpu_with_memory, local_gpu, usable_cores
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import write_atomic, write_json
from lib.report.text import count
from lib.runner.local import LocalExecutor

# Modules with all checks, which workers share instead of importing them again.
_PRELOADED_MODULES = ("gpt2.check.worker",)
RECORD_FILE = "check.json"
# Workers of the check of devices: GPT-2 124M in float64, and its compilation, take about 10 GiB each.
_GPU_WORKERS = 4
# Without a line of progress.
_SILENT_SECONDS = 4.0


@dataclass(frozen=True)
class CheckRequest:
    """Arguments of ``make check``; an empty string selects everything."""

    build_dir: Path
    checks: str = ""
    defconfig: str = ""
    # Layers of SET= and GPUS=.
    settings: Sequence[ConfigLayer] = ()
    # "" or require
    data: str = ""
    # Name in the GPU table, or the memory in GiB of a GPU that the table lacks.
    gpu: str = ""
    gpu_memory_gb: str = ""
    fast: bool = False
    json: bool = False
    # File for the results as JUnit XML; "" for none.
    junit: str = ""

    def __post_init__(self) -> None:
        if self.data not in ("", "require"):
            problem = Problem(
                f"invalid value (expected require, got {self.data!r})",
                "DATA",
                "type: make check DATA=require",
                code="usage.invalid-value",
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
            raise ConfigError(Problem(what, "CHECK_GPU_MEMORY_GB", code="usage.invalid-value"))
        return gpu_with_memory(memory_gib)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Verify on this CPU, in seconds, that every step implements what its name says.

    kablate check                              .config, or the RATIO study if there is no .config
    kablate check --steps 7 --checks causal    one property of one step
    kablate check --fast                       without the slow checks, while editing
    kablate check --defconfig gpt2-124m        another configuration than .config

    Trains small versions of each step and compares them; docs/check.md describes each check. Prints a
    table and one line per failure, and writes check.json to the build folder. Does not modify .config,
    data or results. Exit codes: 0 all passed, 1 a check failed, 2 configuration or usage.
    """
    request = CheckRequest(
        options.build_dir,
        checks=options.checks,
        defconfig=options.defconfig,
        settings=settings_layers(options),
        data=options.data,
        gpu=options.gpu,
        gpu_memory_gb=options.check_gpu_memory_gb,
        fast=options.fast,
        json=options.json,
        junit=options.junit,
    )
    layers = config_layers_to_check(request.build_dir, request.defconfig)
    layers += request.settings
    return check_and_report(plan_cases(layers, options.steps, request.build_dir), request)


def check_and_report(cases: CheckPlan, request: CheckRequest) -> tuple[int, str]:
    """Check the chosen cases and write ``check.json`` into the build folder.

    Returns the exit code and the text for stdout.
    """
    started = time.perf_counter()
    configs = [case.config for case in cases.chosen if case.config]
    checks = select_for(configs, request.checks, fast=request.fast)
    # A check that is named runs on every step.
    named = bool(request.checks)
    reports = run_all(cases, checks, request.build_dir, request.target, all_steps=named)
    if request.data == "require":
        reports = [_require_data(each) for each in reports]
    variables = {
        "DEFCONFIG": request.defconfig,
        "SET": " ".join(
            shlex.quote(f"{a.name}={a.value}")
            for layer in request.settings
            for a in layer.assignments
        ),
        "DATA": request.data,
        "GPU": request.gpu,
        "CHECK_GPU_MEMORY_GB": request.gpu_memory_gb,
    }
    command = " ".join(
        [
            "make check",
            *(f"{name}={shlex.quote(value)}" for name, value in variables.items() if value),
        ]
    )
    seconds = time.perf_counter() - started
    record = to_json(cases, checks, reports, command, seconds)
    request.build_dir.mkdir(parents=True, exist_ok=True)
    write_json(request.build_dir / RECORD_FILE, record)
    if request.junit:
        Path(request.junit).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(request.junit), to_junit(cases, reports, seconds))
    code = EXIT_FAILED if record["failed"] else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    columns = None if is_verbose() else terminal_columns(sys.stdout)
    return code, to_text(cases, checks, reports, command, seconds, columns)


def _require_data(report: CaseReport) -> CaseReport:
    """Return the report with absent data turned into a failure."""
    results = {
        name: CheckResult([replace(f, absent=False) for f in result.findings], result.seconds)
        for name, result in report.results.items()
    }
    return CaseReport(report.slug, results)


def run_all(
    cases: CheckPlan,
    checks: Sequence[Check],
    build_dir: Path,
    gpu: Gpu | None = None,
    *,
    all_steps: bool = True,
) -> list[CaseReport]:
    """Check the chosen cases in workers, one per core. Return reports in the order of the cases.

    ``gpu`` is the GPU named by the user, if any, whose memory the configured size must fit. Costly
    checks run on a cover of the cases, or on ``all_steps``.
    """
    jobs = _jobs(cases, checks, [] if all_steps else covering_steps(cases.chosen))
    reports = {case.slug: CaseReport(case.slug) for case in cases.every}
    others = {case.slug: case for case in cases.every}
    names = ", ".join(check.name for check in checks)
    log("CHECK", f"{count(len(cases.chosen), 'step')}: {names}")
    started = logged = time.monotonic()
    done = _check_in_workers(_executor(checks), jobs, others, build_dir, gpu)
    for number, report in enumerate(done, 1):
        reports[report.slug] = report
        if (now := time.monotonic()) - logged > _SILENT_SECONDS and number < len(jobs):
            log("CHECK", f"{number}/{len(jobs)} steps after {now - started:.0f} s")
            logged = now
    return [_complete(case, checks, reports) for case in cases.chosen]


def _executor(checks: Sequence[Check]) -> LocalExecutor:
    """Return an executor whose workers share the loaded checks."""
    environment = {"OMP_NUM_THREADS": "1", **NO_GPUS}
    if any(check.name == "device" for check in checks):
        # Triton reads this when it is imported.
        environment = (
            {"OMP_NUM_THREADS": "1"} if local_gpu() else environment | {"TRITON_INTERPRET": "1"}
        )
    return LocalExecutor(_PRELOADED_MODULES, environment)


def _check_in_workers(
    executor: LocalExecutor,
    jobs: Sequence[CheckJob],
    others: Mapping[str, CheckCase],
    build_dir: Path,
    gpu: Gpu | None = None,
) -> Iterator[CaseReport]:
    """Yield the report of every job, from one worker per core; few share a GPU."""
    workers, local = min(usable_cores(), len(jobs)), local_gpu()
    if local and any(check.name == "device" for job in jobs for check in job.checks):
        workers = min(workers, _GPU_WORKERS)
    with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
        arguments = (jobs, others, build_dir, Path(tickets), gpu, local)
        started = [executor.submit_call(_run_jobs, *arguments) for _ in range(workers)]
        yield from executor.results(started)


def _run_jobs(*arguments: Any) -> Iterator[CaseReport]:
    """Run jobs in a worker, which has torch loaded."""
    from gpt2.check.worker import run_jobs

    return run_jobs(*arguments)


def _jobs(cases: CheckPlan, checks: Sequence[Check], cover: Sequence[str]) -> list[CheckJob]:
    """Return jobs for chosen cases, and for all others if their fingerprints are needed.

    Costly checks are part of the jobs in ``cover``, or of all if it is empty.
    """
    chosen = {case.slug for case in cases.chosen}
    joint = any(check.joint for check in checks)
    jobs = []
    for case in cases.every:
        if case.config is None or not (joint or case.slug in chosen):
            continue
        own = [c for c in checks if not c.joint and c.name != "resolve" and case.slug in chosen]
        covered = not cover or case.slug in cover
        own = [c for c in own if c.applies_to(case.config) and (c.every or covered)]
        if own or joint:
            jobs.append(CheckJob(case, own, joint))
    # The longest first, so that the workers end at about the same time.
    return sorted(jobs, key=_size, reverse=True)


def _size(job: CheckJob) -> tuple[int, int]:
    """Return the number of checks, and of components, which take most of the time."""
    assert job.case.config is not None
    return len(job.checks), len(components(job.case.config))


def _complete(
    case: CheckCase, checks: Sequence[Check], reports: Mapping[str, CaseReport]
) -> CaseReport:
    """Return a case's report in the order of the checks, with those that need no worker."""
    results = dict(reports[case.slug].results)
    if any(check.name == "resolve" for check in checks):
        results["resolve"] = CheckResult(check_resolve(case), 0.0)
    fingerprints = {slug: r.fingerprint for slug, r in reports.items() if r.fingerprint}
    if case.slug in fingerprints and any(check.joint for check in checks):
        started = time.perf_counter()
        findings = find_duplicates(case.slug, fingerprints)
        seconds = results["distinct"].seconds + time.perf_counter() - started
        results["distinct"] = CheckResult(findings, seconds)
    names = [check.name for check in checks if check.name in results]
    return CaseReport(case.slug, {name: results[name] for name in names})
