"""Execution of a plan: train its runs in workers, train one run in this process, rerun runs."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gpt2.config import Config
from gpt2.planning import EAGER, Plan
from gpt2.sections import sections
from gpt2.target import PRELOAD, Gpt2Target
from lib.analysis.leaderboard import note_elsewhere
from lib.analysis.report import to_json, to_markdown, write_table
from lib.analysis.table import build_table
from lib.cli import confirm
from lib.console import say
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.machine.process import current_process
from lib.machine.setup import environment, require_processes
from lib.plan import Run, own_path
from lib.rundir import RunDir
from lib.runner import locks
from lib.runner.decide import move_aside, refuse_foreign
from lib.runner.interrupts import Interrupts
from lib.runner.pool import Pool
from lib.runner.progress import RunProgress
from lib.runner.runner import LOCK, Options, run_all
from lib.status import is_done, read_status

# Exit codes of an interrupted plan: training will be resumed, so no table is written yet.
_INTERRUPTED_CODES = range(124, 256)


def train_plan(
    plan: Plan, options: Options, table_of: Plan, *, json: bool = False
) -> tuple[int, str]:
    """Train the unfinished runs of ``plan``. Return the exit code and the result table.

    ``table_of`` is the plan whose runs the table shows. ConfigError and PreflightError are raised
    before anything is created.
    """
    _log_skipped(plan)
    pool = new_pool(plan)
    target = Gpt2Target(plan, pool, allow_stale=options.stale == "keep", dirty=options.dirty)
    code = run_all(plan.runs, plan.folder, target, pool, options)
    if code in _INTERRUPTED_CODES:
        return code, ""
    text = report(table_of, json=json)
    if code == EXIT_DONE and plan.study == "ratio" and plan.base.values["MODEL_SIZE"] == "tiny":
        say(
            "NEXT",
            "the study at GPT-2 size, on a GPU: make defconfig-gpt2-ratio-ablation && make",
        )
    return code, text


def report(plan: Plan, *, json: bool = False, label_by: Sequence[str] = ()) -> str:
    """Write the result table of the plan's runs beside the runs. Return the table as text.

    Runs that differ in a field of ``label_by`` get separate rows. Raises ConfigError if a field is
    unknown.
    """
    target = Gpt2Target(plan, new_pool(plan))
    started = [run for run in plan.runs if read_status(RunDir(run.path)) is not None]
    stale = [run.label for run in started if target.differences(RunDir(run.path))]
    skipped = [str(problem) for problem in plan.left_out]
    table = build_table(plan.study, plan.runs, stale, skipped, label_by)
    table = replace(table, sections=sections(plan))
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in write_table(table, plan.folder):
        say("TABLE", str(path))
    if plan.sweep is not None:
        note_elsewhere(plan.folder, [run.path for run in plan.runs])
    return to_json(table) if json else to_markdown(table)


def train_here(plan: Plan, *, dirty: bool = False) -> int:
    """Train the plan's only run, without its paired eager run, in this process.

    A debugger can reach all of the training. Returns the exit code. torchrun starts one process per
    rank; the other ranks wait for rank 0 in ``train.run``. Raises ConfigError if the plan has more
    than one run, or another process trains the run.
    """
    runs = [run for run in plan.runs if run.variant.arm != EAGER]
    if len(runs) != 1:
        what = f"train accepts a single run (expected 1 planned run, got {len(runs)})"
        advice = "type: make train STEPS=7 SEEDS=1"
        raise ConfigError(Problem(what, plan.study, advice, code="usage.not-one-run"))
    (run,) = runs
    refuse_foreign([run])
    if is_done(RunDir(run.path)):
        say("SKIP", f"{run.label}   done; to repeat it: make rerun RUNS={run.variant.slug}")
        return EXIT_DONE
    # Set before torch is imported: libraries read these variables once, at import.
    os.environ.update(environment(run.config.machine))
    from gpt2 import preflight, train

    process = current_process()
    require_processes(process, run.config.train.gpus)
    if process.is_main:
        preflight.check_machine(
            [run.config], preflight.TrainingPlace(plan.build_dir, plan.folder, dirty)
        )
    with Interrupts() as interrupts, ExitStack() as lock:
        if process.is_main:
            preflight.check_weights([run.config], plan.build_dir)
            preflight.check_data([run.config], plan.build_dir)
            run.path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locks.exclusive(RunDir(run.path).lock))
            Gpt2Target(plan, new_pool(plan)).prepare(run)
        status = train.run(
            run.path,
            plan.build_dir,
            lambda event: _log_event(run, event),
            lambda: interrupts.stopped,
        )
    return status.exit_code


def rerun(plan: Plan, patterns: str, *, yes: bool = False) -> Plan:
    """Move the directories of the matching runs aside. Return the plan of the matching runs.

    Asks for confirmation first. Raises ConfigError if stdin is not interactive, a pattern matches no
    run, or a run is active.
    """
    runs = plan.matching(patterns)
    locks.refuse_if_held(plan.folder / LOCK)
    # Results reused from another directory stay there; the run is trained again in this folder.
    runs = [replace(run, path=own_path(run, plan.folder)) for run in runs]
    existing = [run for run in runs if run.path.exists()]
    if existing:
        question = f"train {len(existing)} of {len(plan.runs)} runs again (old results are kept)?"
        confirm(question, yes)
    for run in existing:
        say("RERUN", f"{run.label}   old run moved to {move_aside(RunDir(run.path)).name}")
    return replace(plan, runs=runs)


def new_pool(plan: Plan) -> Pool:
    """Return a pool of workers for the runs of ``plan``."""
    return Pool(PRELOAD, environment(plan.base.machine))


def _log_skipped(plan: Plan) -> None:
    for problem in plan.left_out:
        say("OMIT", f"{plan.study}/{problem}")


def _log_event(run: Run[Config], event: dict[str, Any]) -> None:
    """Log one line per event, without a label: only one run is trained."""
    if event["kind"] == "line":
        say(event["tag"], event["text"])
    elif event["kind"] == "progress":
        progress = RunProgress(run)
        progress.update(event)
        say("TRAIN", progress.describe())
