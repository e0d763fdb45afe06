"""``make check`` from its variables to its exit code; imports no torch."""

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
    """What a user asked for; empty words choose all."""

    build_dir: Path
    steps: str = ""
    checks: str = ""
    defconfig: str = ""
    # "" or require
    data: str = ""
    # Name in the table of GPUs, and memory in GiB of one that is not in it.
    gpu: str = ""
    gpu_memory_gb: str = ""
    fast: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.data not in ("", "require"):
            problem = Problem(
                f"{self.data!r} is not require", "DATA", "type: make check DATA=require"
            )
            raise ConfigError(problem)

    @property
    def target(self) -> Gpu | None:
        """The GPU that was named. ConfigError when it is unknown, or no GPU."""
        if not self.gpu_memory_gb:
            return gpu_named(self.gpu) if self.gpu else None
        if self.gpu:
            raise ConfigError(Problem("says what GPU= says already", "CHECK_GPU_MEMORY_GB"))
        try:
            memory_gib = float(self.gpu_memory_gb)
        except ValueError:
            memory_gib = math.nan
        if not 0 < memory_gib < math.inf:
            what = f"{self.gpu_memory_gb!r} is not a number above 0"
            raise ConfigError(Problem(what, "CHECK_GPU_MEMORY_GB"))
        return gpu_with_memory(memory_gib)


def check(request: Request) -> tuple[int, str]:
    """Check a configuration; the exit code and the text for stdout."""
    layers = checked_layers(request.build_dir, request.defconfig)
    return check_cases(find_cases(layers, request.steps), request)


def check_cases(cases: Cases, request: Request) -> tuple[int, str]:
    """Check some cases; also writes ``check.json`` into the build folder."""
    started = time.perf_counter()
    checks = select(request.checks, fast=request.fast)
    reports = run_all(cases, checks, request.build_dir, request.target)
    if request.data == "require":
        reports = [_require_data(found) for found in reports]
    given = {
        "DEFCONFIG": request.defconfig,
        "DATA": request.data,
        "GPU": request.gpu,
        "CHECK_GPU_MEMORY_GB": request.gpu_memory_gb,
    }
    command = " ".join(["make check", *(f"{name}={text}" for name, text in given.items() if text)])
    seconds = time.perf_counter() - started
    record = report.document(cases, checks, reports, command, seconds)
    request.build_dir.mkdir(parents=True, exist_ok=True)
    write_json(request.build_dir / RECORD, record)
    code = EXIT_FAILED if record["failed"] else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, report.text(cases, checks, reports, command, seconds)


def _require_data(found: Report) -> Report:
    """Absent data as a failure."""
    results = {
        name: Result([replace(f, absent=False) for f in result.findings], result.seconds)
        for name, result in found.results.items()
    }
    return Report(found.slug, results)
