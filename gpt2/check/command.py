"""The ``make check`` command, from its variables to its exit code; imports no torch."""

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.check import Check, select
from gpt2.check.cases import CheckCase, CheckPlan, config_layers_to_check, plan_cases
from gpt2.check.cover import components, covering_steps
from gpt2.check.distinct import find_duplicates
from gpt2.check.finding import CheckFinding
from gpt2.check.report import CaseReport, CheckReport, CheckResult
from gpt2.quantized.options import missing_package
from gpt2.study.arguments import settings_layers
from lib.console import is_verbose, log, terminal_columns
from lib.env.gpu import NO_GPUS, Gpu, find_gpu, gpu_with_memory, local_gpu, usable_cores
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, PreflightError, Problem
from lib.files import write_atomic, write_json
from lib.runner.local import LocalExecutor
from lib.units import count

# Workers of the check of devices: GPT-2 124M in float64, and its compilation, take about 10 GiB each.
_GPU_WORKERS = 4
# Without a line of progress.
_SILENT_SECONDS = 4.0
# A case, and the names of its checks.
CheckJob = tuple[CheckCase, Sequence[str]]


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Verify on this CPU, in seconds, that every step implements what its name says.

    kablate check                              .config, or the RATIO study if there is no .config
    kablate check --steps 7 --checks causal    one property of one step
    kablate check --fast                       without the slow checks, while editing
    kablate check --defconfig gpt2-124m        another configuration than .config

    Trains small versions of each step and compares them; docs/check.md describes each check. Prints a
    table and one line per failure, and writes check.json to the build folder. Does not modify .config,
    data or results. Exit codes: 0 all passed, 1 a check failed, 2 configuration or usage, 3 a package
    of a step is missing.
    """
    build_dir, gpu, settings = options.build_dir, _named_gpu(options), settings_layers(options)
    if options.data not in ("", "require"):
        what, advice = f"expected require, got {options.data!r}", "type: make check DATA=require"
        what = f"invalid value ({what})"
        raise ConfigError(Problem(what, "DATA", advice, code="usage.invalid-value"))
    assigned = [f"{a.name}={a.value}" for layer in settings for a in layer.assignments]
    variables = {
        "DEFCONFIG": options.defconfig,
        "SET": " ".join(map(shlex.quote, assigned)),
        "DATA": options.data,
        "GPU": options.gpu,
        "CHECK_GPU_MEMORY_GB": options.check_gpu_memory_gb,
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
    layers = [*config_layers_to_check(build_dir, options.defconfig), *settings]
    return check_and_report(
        plan_cases(layers, options.steps, build_dir),
        build_dir,
        checks=options.checks,
        fast=options.fast,
        gpu=gpu,
        require_data=bool(options.data),
        command=" ".join(["make check", *words]),
        json_document=options.json,
        junit=options.junit,
    )


def _named_gpu(options: argparse.Namespace) -> Gpu | None:
    """Return the GPU that was named, by its name or its memory, or None."""
    memory, where = options.check_gpu_memory_gb, "CHECK_GPU_MEMORY_GB"
    if not memory:
        return find_gpu(options.gpu) if options.gpu else None
    if options.gpu:
        raise ConfigError(Problem("cannot be combined with GPU=", where, code="usage.conflict"))
    try:
        gib = float(memory)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        what = f"invalid value (expected a number > 0, got {memory!r})"
        raise ConfigError(Problem(what, where, code="usage.invalid-value"))
    return gpu_with_memory(gib)


def check_and_report(
    cases: CheckPlan,
    build_dir: Path,
    *,
    checks: str = "",
    fast: bool = False,
    gpu: Gpu | None = None,
    require_data: bool = False,
    command: str = "make check",
    json_document: bool = False,
    junit: str = "",
) -> tuple[int, str]:
    """Check the chosen cases and write ``check.json``, and the file ``junit`` unless it is "".

    ``command`` repeats a check if the names of step and check are appended. Returns the exit code
    and the text for stdout. Raises PreflightError if a step needs a package that is missing.
    """
    configs = [case.config for case in cases.chosen if case.config]
    bases = dict.fromkeys(part.base for config in configs for part in config.model.adapters)
    if problems := missing_package(bases, "LORA_BASE"):
        raise PreflightError(*problems)
    started = time.perf_counter()
    prunes = any(config.pruning.name != "none" for config in configs)
    selected = select(checks, fast=fast, prunes=prunes)
    # A check that is named runs on every step.
    cases_reports = run_all(cases, selected, build_dir, gpu, all_steps=bool(checks))
    for each in cases_reports if require_data else ():
        for name, result in each.results.items():
            findings = [replace(finding, absent=False) for finding in result.findings]
            each.results[name] = replace(result, findings=findings)
    seconds = time.perf_counter() - started
    report = CheckReport(cases, selected, cases_reports, command, seconds)
    record = report.to_json()
    build_dir.mkdir(parents=True, exist_ok=True)
    write_json(build_dir / "check.json", record)
    if junit:
        Path(junit).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(junit), report.to_junit())
    code = EXIT_FAILED if record["failed"] else EXIT_DONE
    if json_document:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, report.to_text(None if is_verbose() else terminal_columns(sys.stdout))


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
    jobs = plan_jobs(cases, checks, [] if all_steps else covering_steps(cases.chosen))
    others = {case.slug: case for case in cases.every}
    local, by_device = local_gpu(), any(check.name == "device" for check in checks)
    environment, workers = {"OMP_NUM_THREADS": "1"}, min(usable_cores(), len(jobs))
    if local and by_device:
        workers = min(workers, _GPU_WORKERS)
    else:
        environment |= NO_GPUS
    if by_device and not local:
        # Triton reads this when it is imported.
        environment["TRITON_INTERPRET"] = "1"
    names = ", ".join(check.name for check in checks)
    log("CHECK", f"{count(len(cases.chosen), 'step')}: {names}")
    executor, reports = LocalExecutor(("gpt2.check.worker",), environment), dict[str, CaseReport]()
    started = logged = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
        arguments = (jobs, others, build_dir, Path(tickets), gpu, local)
        calls = [executor.submit_call(_run_jobs, *arguments) for _ in range(workers)]
        for number, report in enumerate(executor.results(calls), 1):
            reports[report.slug] = report
            if (now := time.monotonic()) - logged > _SILENT_SECONDS and number < len(jobs):
                log("CHECK", f"{number}/{len(jobs)} steps after {now - started:.0f} s")
                logged = now
    return [completed(case, checks, reports) for case in cases.chosen]


def _run_jobs(*arguments: Any) -> Iterator[CaseReport]:
    """Run jobs in a worker, which has torch loaded."""
    from gpt2.check.worker import run_jobs

    return run_jobs(*arguments)


def plan_jobs(cases: CheckPlan, checks: Sequence[Check], cover: Sequence[str]) -> list[CheckJob]:
    """Return jobs for chosen cases, of costly checks for those in ``cover``, or for all without one.

    All cases that resolve are jobs if they are to be compared.
    """
    chosen = {case.slug for case in cases.chosen}
    jobs = list[tuple[int, int, int, CheckJob]]()
    for case in cases.every:
        if (config := case.config) is None:
            continue
        covered, prunes = not cover or case.slug in cover, config.pruning.name != "none"
        names = [
            check.name
            for check in checks
            if (case.slug in chosen or check.name == "distinct")
            and check.name != "resolve"
            and (check.every or covered)
            and (prunes or not check.pruning)
        ]
        if names:
            # The longest first, so that the workers end at about the same time.
            jobs.append((-len(names), -len(components(config)), len(jobs), (case, names)))
    return [job for *_, job in sorted(jobs)]


def completed(
    case: CheckCase, checks: Sequence[Check], reports: Mapping[str, CaseReport]
) -> CaseReport:
    """Return a case's report in the order of the checks, with those that need no worker."""
    report = reports.get(case.slug, CaseReport(case.slug))
    results = dict(report.results)
    results["resolve"] = CheckResult(
        [
            CheckFinding(
                "resolved-configuration",
                "a step that resolves",
                "; ".join(line.strip() for line in str(problem).splitlines()),
            )
            for problem in case.problems
        ]
    )
    if report.fingerprint:
        fingerprints = {slug: r.fingerprint for slug, r in reports.items() if r.fingerprint}
        findings = find_duplicates(case.slug, fingerprints)
        results["distinct"] = replace(results["distinct"], findings=findings)
    names = [check.name for check in checks if check.name in results]
    return CaseReport(case.slug, {name: results[name] for name in names})
