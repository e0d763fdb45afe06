"""The product without a fault: lines that each case executes, cost of its checks, and its results.

Kept in the build folder as long as no source file changes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2.check import CHECKS
from gpt2.mutation.cases import CASES
from gpt2.mutation.process import Plant, TrialResult, run_trial
from lib.errors import Problem, RunError
from lib.files import write_json
from lib.json_files import RecordError, read_json_object
from lib.project import ROOT

BASELINE_FILE = "mutation-baseline.json"
_LIMIT_SECONDS = 300.0
# Checks that need prepared data, which the trials do not have.
_SKIPPED = ("data",)
# Trials of each case without a fault, by the name of the function in gpt2.mutation.trial.
_TRIALS = ("run_checks", "observe", "covered_lines")
# Modules that no trial without a fault depends on.
_FREE = [
    ROOT / "gpt2" / "mutation" / name
    for name in ("operators.py", "faults.py", "verdict.py", "command.py")
]
# Function of gpt2.mutation.trial, and the name of a case.
BaselineJob = tuple[str, str]


@dataclass(frozen=True)
class Baseline:
    """Facts about the cases, all by the name of the case."""

    # Digest of the sources.
    key: str
    # Path → line → cases.
    coverage: Mapping[str, Mapping[int, Sequence[str]]]
    # Checks, cheapest first.
    order: Mapping[str, Sequence[str]]
    # CPU seconds of all checks, and of all runs.
    check_seconds: Mapping[str, float]
    observe_seconds: Mapping[str, float]
    # Digest of the results and losses, in each shape.
    results: Mapping[str, Sequence[tuple[str, Sequence[float]]]]
    # Digest of the configuration of every step of the defconfigs.
    configs: Mapping[str, str]

    def write(self, build_dir: Path) -> None:
        """Write the baseline into the build folder."""
        build_dir.mkdir(parents=True, exist_ok=True)
        write_json(build_dir / BASELINE_FILE, asdict(self))


def read_baseline(build_dir: Path, key: str) -> Baseline | None:
    """Return the baseline of the current sources, or None if there is none."""
    try:
        fields = read_json_object(build_dir / BASELINE_FILE)
    except RecordError:
        return None
    if fields.get("key") != key:
        return None
    lines = fields.pop("coverage")
    coverage = {path: {int(n): cases for n, cases in at.items()} for path, at in lines.items()}
    return Baseline(coverage=coverage, **fields)


def baseline_key() -> str:
    """Return a digest of all that a trial without a fault depends on."""
    sha256 = hashlib.sha256()
    for folder in ("gpt2", "lib", "defconfigs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path not in _FREE:
                sha256.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return sha256.hexdigest()


def baseline_jobs() -> list[BaselineJob]:
    """Return the trials without a fault, expensive ones first."""
    jobs = [(function, case) for case in CASES for function in _TRIALS]
    return [*sorted(jobs, key=lambda job: "nsa" not in job[1]), ("resolved_digests", "")]


def run_baseline_job(job: BaselineJob, stopped: Any) -> tuple[BaselineJob, TrialResult]:
    """Run a trial without a fault; runs in a worker."""
    function, name = job
    arguments: dict[str, Sequence[Any]] = {
        "run_checks": ([CASES.get(name)], [check for check in CHECKS if check not in _SKIPPED]),
        "observe": ([CASES.get(name)],),
        "covered_lines": (CASES.get(name),),
        "resolved_digests": (),
    }
    return job, run_trial(function, arguments[function], Plant(), _LIMIT_SECONDS, stopped)


def assemble(key: str, results: Iterable[tuple[BaselineJob, TrialResult]]) -> Baseline:
    """Return the baseline from the results of its jobs.

    Raises RunError if a case fails without a fault.
    """
    by_job = dict(results)
    coverage: dict[str, dict[int, list[str]]] = {}
    problems = []
    for (function, name), result in sorted(by_job.items()):
        text = f"{result.end}: {result.text}" if result.end else ""
        if function == "run_checks" and not result.end and result.value["caught"]:
            caught = result.value["caught"]
            text = f"{caught['check']}: {caught['text']}"
        if text:
            what = f"{name}: fails without a fault ({function}): {text}"
            problems.append(Problem(what, code="mutation.baseline-failed"))
        elif function == "covered_lines":
            for path, lines in result.value.items():
                for line in lines:
                    coverage.setdefault(path, {}).setdefault(line, []).append(name)
    if problems:
        raise RunError(*problems)
    seconds = {name: by_job["run_checks", name].value["seconds"] for name in CASES}
    return Baseline(
        key=key,
        coverage=coverage,
        order={name: sorted(times, key=lambda c: times[c]) for name, times in seconds.items()},
        check_seconds={name: by_job["run_checks", name].cpu_seconds for name in CASES},
        observe_seconds={name: by_job["observe", name].cpu_seconds for name in CASES},
        results={name: by_job["observe", name].value[name] for name in CASES},
        configs=by_job["resolved_digests", ""].value,
    )
