"""``make check`` from its variables to its exit code; imports no torch."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.check import report, select
from gpt2.check.cases import Cases, checked_layers, find_cases
from gpt2.check.run import Report, Result, run_all
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import write_json

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
    fast: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.data not in ("", "require"):
            problem = Problem(
                f"{self.data!r} is not require", "DATA", "type: make check DATA=require"
            )
            raise ConfigError(problem)


def check(request: Request) -> tuple[int, str]:
    """Check a configuration; the exit code and the text for stdout."""
    layers = checked_layers(request.build_dir, request.defconfig)
    return check_cases(find_cases(layers, request.steps), request)


def check_cases(cases: Cases, request: Request) -> tuple[int, str]:
    """Check some cases; also writes ``check.json`` into the build folder."""
    started = time.perf_counter()
    checks = select(request.checks, fast=request.fast)
    reports = run_all(cases, checks, request.build_dir)
    if request.data == "require":
        reports = [_require_data(found) for found in reports]
    command = "make check" + (f" DEFCONFIG={request.defconfig}" if request.defconfig else "")
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
