"""The ``make randcheck`` command: random configurations through all checks; imports no torch."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.check import Check, select
from gpt2.check.cases import Case
from gpt2.check.draw import Drawn, draw
from gpt2.check.report import SCHEMA_VERSION
from gpt2.check.run import PRELOAD, Job, Report
from lib.console import say
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import write_atomic
from lib.kconfig import Layer, Tree
from lib.machine.devices import usable_cores
from lib.runner.pool import Pool
from lib.units import clock

# Every draw resolves, needs no prepared data, and has no target GPU.
_SKIPPED_CHECKS = ("resolve", "data", "full_size")
_PROGRESS_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True)
class Request:
    """Arguments of ``make randcheck``."""

    build_dir: Path
    count: int
    seed: int
    checks: str = ""
    fast: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            problem = Problem(
                f"invalid value (expected at least 1, got {self.count})",
                "N",
                "type: make randcheck N=50",
                code="usage.invalid-argument",
            )
            raise ConfigError(problem)


@dataclass(frozen=True)
class Failure:
    """A draw that failed a check, and a minimal defconfig that still fails it."""

    number: int
    check: str
    # Other checks that the draw failed; the reduced configuration may pass them.
    others: Sequence[str]
    expected: str
    found: str
    defconfig: str
    # File name in the build folder.
    file: str

    @property
    def repeat(self) -> str:
        """Return the command that repeats the check."""
        return f"make check KCONFIG_CONFIG={self.file} CHECKS={self.check}"


def randcheck(request: Request) -> tuple[int, str]:
    """Draw and check configurations, and reduce those that fail.

    Writes ``randcheck-N.defconfig`` into the build folder for each draw N that failed. Returns the
    exit code and the text for stdout.
    """
    started = time.monotonic()
    checks = [c for c in select(request.checks, fast=request.fast) if c.name not in _SKIPPED_CHECKS]
    tree = Tree()
    drawn = [draw(tree, request.seed, number) for number in range(request.count)]
    request.build_dir.mkdir(parents=True, exist_ok=True)
    for old in request.build_dir.glob("randcheck-*.defconfig"):
        old.unlink()
    pool = Pool(PRELOAD, {"OMP_NUM_THREADS": "1"})
    reports = _check_all(pool, drawn, checks, request.build_dir)
    failures = []
    for one in drawn:
        if failed := _failed_checks(reports[str(one.number)]):
            say("REDUCE", f"configuration {one.number} ({failed[0]} failed)")
            report = reports[str(one.number)]
            failures.append(_reduce(pool, tree, one, report, failed, request.build_dir))
    record = {
        "schema_version": SCHEMA_VERSION,
        "seed": request.seed,
        "configurations": request.count,
        "rejected_draws": sum(one.rejected for one in drawn),
        "checks": [check.name for check in checks],
        "failures": [vars(failure) | {"repeat": failure.repeat} for failure in failures],
        "seconds": round(time.monotonic() - started, 1),
    }
    code = EXIT_FAILED if failures else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, _text(record, failures)


def _check_all(
    pool: Pool, drawn: Sequence[Drawn], checks: Sequence[Check], build_dir: Path
) -> dict[str, Report]:
    """Check draws with one worker per core. Return the reports by draw number."""
    jobs = [Job(case_of(one), checks, False) for one in drawn]
    reports: dict[str, Report] = {}
    started, last_log = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="kablate-check-") as tickets:
        arguments = (jobs, {}, build_dir, Path(tickets), None)
        workers = min(usable_cores(), len(jobs))
        for report in pool.gather("gpt2.check.run:work", [arguments] * workers):
            reports[report.slug] = report
            now = time.monotonic()
            if now - last_log >= _PROGRESS_INTERVAL_SECONDS or len(reports) == len(jobs):
                last_log = now
                failed = sum(bool(_failed_checks(report)) for report in reports.values())
                eta_seconds = (now - started) / len(reports) * (len(jobs) - len(reports))
                text = f"{len(reports)}/{len(jobs)} configurations, {failed} failed"
                say("CHECK", f"{text}, eta {clock(eta_seconds)}" if eta_seconds else text)
    return reports


def case_of(one: Drawn) -> Case:
    """Return the case of a draw."""
    number = str(one.number)
    return Case(f"random/{number}", number, number, one.config)


def _failed_checks(report: Report) -> list[str]:
    return [name for name, result in report.results.items() if result.state == "failed"]


def _reduce(
    pool: Pool, tree: Tree, one: Drawn, report: Report, failed: Sequence[str], build_dir: Path
) -> Failure:
    """Reduce a draw to the fewest settings that fail its first failed check, and write them."""
    arguments = (one.settings, failed[0], build_dir)
    settings: Mapping[str, str] = pool.call("gpt2.check.reduce:reduce_settings", *arguments)
    text = tree.minimal([Layer.of("defconfig", "random", settings)])
    file = f"randcheck-{one.number}.defconfig"
    write_atomic(build_dir / file, text)
    finding = report.results[failed[0]].findings[0]
    return Failure(one.number, failed[0], failed[1:], finding.expected, finding.found, text, file)


def _text(record: Mapping[str, Any], failures: Sequence[Failure]) -> str:
    lines = []
    for failure in failures:
        outcome = f"expected {failure.expected}; found: {failure.found}  [{failure.repeat}]"
        lines.append(f"FAIL  random/{failure.number}  {failure.check}: {outcome}")
        if failure.others:
            lines.append(f"      also failed {', '.join(failure.others)}")
        lines += [f"      {line}" for line in failure.defconfig.splitlines()]
    count, failed = record["configurations"], len(failures)
    lines.append(
        f"SEED={record['seed']}, {record['rejected_draws']} draws rejected; "
        f"{record['seconds']:.0f} s in all"
    )
    return "\n".join([*lines, f"{count - failed} passed, {failed} failed"]) + "\n"
