"""The ``make check`` command, from its variables to its exit code; imports no torch."""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.check import report, select
from gpt2.check.cases import Cases, checked_layers, find_cases
from gpt2.check.run import Report, Result, run_all
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import write_json
from lib.machine.gpus import Gpu, gpu_named, gpu_with_memory

RECORD = "check.json"


@dataclass(frozen=True)
class Request:
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
            return gpu_named(self.gpu) if self.gpu else None
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


def check(request: Request) -> tuple[int, str]:
    """Check a configuration. Return the exit code and the text for stdout."""
    layers = checked_layers(request.build_dir, request.defconfig)
    return check_cases(find_cases(layers, request.steps), request)


def check_cases(cases: Cases, request: Request) -> tuple[int, str]:
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
    record = report.document(cases, checks, reports, command, seconds)
    request.build_dir.mkdir(parents=True, exist_ok=True)
    write_json(request.build_dir / RECORD, record)
    code = EXIT_FAILED if record["failed"] else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, report.text(cases, checks, reports, command, seconds)


def _require_data(report: Report) -> Report:
    """Return the report with absent data turned into a failure."""
    results = {
        name: Result([replace(f, absent=False) for f in result.findings], result.seconds)
        for name, result in report.results.items()
    }
    return Report(report.slug, results)
