"""The ``make mutation-test`` command: plant faults, and report how many ``make check`` catches."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2.check import take_ticket
from gpt2.mutation.baseline import (
    Baseline,
    BaselineJob,
    assemble,
    baseline_jobs,
    baseline_key,
    read_baseline,
    run_baseline_job,
)
from gpt2.mutation.cases import CASES
from gpt2.mutation.faults import Fault, SourceTree, draw, in_area
from gpt2.mutation.process import TrialResult
from gpt2.mutation.verdict import CAUGHT, EQUIVALENT, SURVIVED, FaultTrial, FaultVerdict
from lib.console import log
from lib.env.gpu import NO_GPUS, usable_cores
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.files import write_json
from lib.project import ROOT
from lib.runner.local import LocalExecutor
from lib.units import format_duration

RECORD_FILE = "mutation-test.json"
SCHEMA_VERSION = 1
# Share of the faults that change a run and must be caught.
GOAL = 0.95
_PROGRESS_INTERVAL_SECONDS = 5.0
# Packages that the product imports. Each trial imports the product itself again.
_PRELOADED_MODULES = (
    *("torch", "torch._dynamo", "torch.utils.data"),
    *("torch.distributed", "numpy", "kconfiglib", "yaml", "safetensors.torch"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Plant faults in the product one at a time, and report how many of them make check catches.

    kablate mutation-test                                 60 faults, drawn from all areas
    kablate mutation-test --count 150 --seed 2            more, and others
    kablate mutation-test --area pruning,schedule         of some areas
    kablate mutation-test --area lib/optim/schedule.py:40 of one line

    A fault changes one expression or statement that training or evaluation executes; the checks run on
    configurations that execute it, in forked processes. A fault that no check catches and that changes
    no result is equivalent, and does not count. docs/check.md describes the operators and the rules.
    Writes mutation-test.json to the build folder; nothing in the tree is modified. Exit codes: 0 the
    goal is reached, 1 it is not, or a check fails without a fault; 2 usage.
    """
    started, build_dir = time.monotonic(), options.build_dir.absolute()
    # An unknown area is an error before the baseline is computed.
    in_area((), ",".join(w for w in options.area.replace(",", " ").split() if ".py" not in w))
    executor = LocalExecutor(_PRELOADED_MODULES, {"OMP_NUM_THREADS": "1", **NO_GPUS})
    baseline = _baseline(executor, build_dir)
    tree = SourceTree(ROOT)
    every = list(tree.faults(baseline.coverage, list(CASES)))
    faults = draw(in_area(every, options.area), options.count, options.seed)
    verdicts = _try_all(executor, faults, baseline)
    seconds = time.monotonic() - started
    record = _record(tree, options, verdicts, seconds)
    write_json(build_dir / RECORD_FILE, record)
    code = EXIT_DONE if _rate(verdicts) >= GOAL else EXIT_FAILED
    if options.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, _text(tree, verdicts, seconds)


def _baseline(executor: LocalExecutor, build_dir: Path) -> Baseline:
    """Return the baseline of the sources, measured if there is none in the build folder."""
    key = baseline_key()
    baseline = read_baseline(build_dir, key)
    if baseline is None:
        jobs = baseline_jobs()
        log("MUTATE", f"measuring {len(CASES)} configurations without a fault")
        progress = _Progress("trials without a fault", len(jobs))
        results: list[tuple[BaselineJob, TrialResult]] = []
        for result in _in_workers(executor, _run_baseline, len(jobs), jobs):
            results.append(result)
            progress.update(len(results))
        baseline = assemble(key, results)
        baseline.write(build_dir)
    return baseline


def _try_all(
    executor: LocalExecutor, faults: Sequence[Fault], baseline: Baseline
) -> list[FaultVerdict]:
    """Return the verdicts on all faults, in the order of the faults."""
    verdicts: dict[Fault, FaultVerdict] = {}
    progress = _Progress("faults", len(faults))
    for verdict in _in_workers(executor, _run_faults, len(faults), faults, baseline):
        verdicts[verdict.fault] = verdict
        states = Counter(each.state for each in verdicts.values())
        text = f"{states[CAUGHT]} caught, {states[SURVIVED]} survived"
        progress.update(len(verdicts), text)
    return [verdicts[fault] for fault in faults]


class _Progress:
    """Log lines with the number of finished jobs and the time left."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._started = self._logged = time.monotonic()

    def update(self, done: int, text: str = "") -> None:
        """Log the progress if the last line is older than the interval, or at the end."""
        now = time.monotonic()
        if now - self._logged < _PROGRESS_INTERVAL_SECONDS and done < self._total:
            return
        self._logged = now
        eta_seconds = (now - self._started) / done * (self._total - done)
        parts = [f"{done}/{self._total} {self._what}", text, f"eta {format_duration(eta_seconds)}"]
        log("MUTATE", ", ".join(part for part in parts if part))


def _in_workers(
    executor: LocalExecutor, function: Callable[..., Iterator[Any]], jobs: int, *arguments: Any
) -> Iterator[Any]:
    """Yield the values of ``function``, called with tickets, from one worker per core.

    Workers take the next job whose ticket is left; they stop if the folder of tickets is removed.
    """
    with tempfile.TemporaryDirectory(prefix="kablate-mutation-") as tickets:
        workers = min(usable_cores(), jobs)
        yield from executor.call_many(function, [(*arguments, Path(tickets))] * workers)


def _run_baseline(
    jobs: Sequence[BaselineJob], tickets: Path
) -> Iterator[tuple[BaselineJob, TrialResult]]:
    """Run the trials without a fault that no other worker has taken. Runs in a worker."""
    for number, job in enumerate(jobs):
        if take_ticket(tickets / str(number)):
            yield run_baseline_job(job, lambda: not tickets.exists())


def _run_faults(
    faults: Sequence[Fault], baseline: Baseline, tickets: Path
) -> Iterator[FaultVerdict]:
    """Try the faults that no other worker has taken. Runs in a worker."""
    tree = SourceTree(ROOT)
    for number, fault in enumerate(faults):
        if take_ticket(tickets / str(number)):
            yield FaultTrial(tree, fault, baseline, lambda: not tickets.exists()).run()


def _rate(verdicts: Sequence[FaultVerdict]) -> float:
    """Return the share of caught faults among those that are not equivalent."""
    states = Counter(verdict.state for verdict in verdicts)
    planted = states[CAUGHT] + states[SURVIVED]
    return states[CAUGHT] / planted if planted else 1.0


def _record(
    tree: SourceTree, options: argparse.Namespace, verdicts: Sequence[FaultVerdict], seconds: float
) -> dict[str, Any]:
    """Return the report for JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": options.seed,
        "area": options.area,
        "goal": GOAL,
        "kill_rate": round(_rate(verdicts), 4),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(verdict.cpu_seconds for verdict in verdicts), 1),
        "caught_by": dict(Counter(v.by for v in verdicts if v.state == CAUGHT)),
        "faults": [_fault_record(tree, verdict) for verdict in verdicts],
    }


def _fault_record(tree: SourceTree, verdict: FaultVerdict) -> dict[str, Any]:
    fault = verdict.fault
    before, after = tree.described(fault)
    names = ("area", "path", "line", "function", "operator")
    fields = {name: vars(fault)[name] for name in names} | {"before": before, "after": after}
    results = {k: v for k, v in vars(verdict).items() if k != "fault"}
    # JSON has no infinity, the value for a failed run.
    results["changed"] = {k: str(v) for k, v in verdict.changed.items()}
    return fields | results | {"cpu_seconds": round(verdict.cpu_seconds, 2)}


def _text(tree: SourceTree, verdicts: Sequence[FaultVerdict], seconds: float) -> str:
    """Return the table of areas, the checks that caught faults, and the survivors."""
    lines = [f"{'area':<12}{'planted':>9}{'caught':>9}{'equal':>9}{'survived':>10}{'rate':>8}"]
    for area in [*dict.fromkeys(verdict.fault.area for verdict in verdicts), "all"]:
        chosen = [v for v in verdicts if area in ("all", v.fault.area)]
        states = Counter(verdict.state for verdict in chosen)
        counts = f"{len(chosen):>9}{states[CAUGHT]:>9}{states[EQUIVALENT]:>9}{states[SURVIVED]:>10}"
        lines.append(f"{area:<12}{counts}{_rate(chosen):>8.0%}")
    caught = [verdict for verdict in verdicts if verdict.state == CAUGHT]
    by = Counter(verdict.by for verdict in caught)
    lines.append("caught by: " + ", ".join(f"{name} {n}" for name, n in by.most_common()))
    errors = sum(verdict.is_error for verdict in caught)
    lines.append(f"{errors} of {len(caught)} raise an exception or end the process")
    lines += [line for v in verdicts if v.state == SURVIVED for line in _survivor(tree, v)]
    cpu_seconds = sum(verdict.cpu_seconds for verdict in verdicts)
    lines.append(f"{seconds:.0f} s in all, {cpu_seconds:.0f} s of CPU time for the faults")
    lines.append(f"kill rate {_rate(verdicts):.1%} (goal {GOAL:.0%})")
    return "\n".join(lines) + "\n"


def _survivor(tree: SourceTree, verdict: FaultVerdict) -> list[str]:
    """Return the lines about a fault that no check catches."""
    fault, (before, after) = verdict.fault, tree.described(verdict.fault)
    changes = [
        name if change is None else f"{name} (loss by {change:.1e})"
        for name, change in list(verdict.changed.items())[:3]
    ]
    reason = f"changes {', '.join(changes)}" if changes else verdict.text
    first = f"SURVIVED  {fault.location}  {fault.area}, {fault.operator}: {reason}"
    return [first, f"    - {before}", f"    + {after}"]
