"""Train the runs of a plan in workers or in this process, again, or outside of the plans of .config."""

import faulthandler
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.running.backend import Gpt2Backend
from gpt2.running.preflight import TrainingPlace, check_data, check_machine, check_weights
from gpt2.running.results import StudyResults, judged_document, write_results
from gpt2.study.plan import AUTO_SEEDS, Plan, declared_verdicts, table_plan, with_runs
from lib.console import confirm, log
from lib.env.machine import require_world_size, worker_environment
from lib.env.ranks import current_process
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, KablateError, Problem
from lib.report.columns import VERDICTS
from lib.report.judge import LASTING_WORDS, declare
from lib.report.render import json_document
from lib.report.study import SCHEMA_VERSION
from lib.report.text import verdicts_exit_code
from lib.runner.display import RunProgress
from lib.runner.hooks import feed_command
from lib.runner.queue import require_matching_directories, set_aside
from lib.runner.runner import RunnerOptions, run_all
from lib.runner.signals import SignalCounter
from lib.runner.worker import warnings_in
from lib.runs.lease import guard_of_other_ranks, require_free, take_lease
from lib.runs.record import RunRecord
from lib.runs.run import Run, training_order
from lib.runs.run_dir import RunDir, State

# Exit codes of an interrupted plan: training will be resumed, so no table is written yet.
_INTERRUPTED_CODES = range(124, 256)


def train_plan(
    plan: Plan,
    options: RunnerOptions,
    table_of: Plan | None = None,
    *,
    json: bool = False,
    strict: bool = False,
) -> tuple[int, str]:
    """Train the unfinished runs of ``plan``. Return the exit code and the result table.

    ``table_of`` is the plan whose runs the table shows, by default those of the plan's study. If
    ``strict``, the exit code of finished runs is that of their verdicts. ConfigError and PreflightError
    are raised before anything is created.
    """
    shown, results, text = table_of or table_plan(plan), None, ""
    begun: list[Plan] = []
    try:
        if plan.auto is not None:
            code, results = _train_looks(plan, options, begun)
        else:
            code = train_runs(plan, plan.runs, options, begun)
            results = None if code in _INTERRUPTED_CODES else write_results(shown)
        if results is not None:
            results.publish()
            text = results.text(json=json)
            if strict:
                code = code or verdicts_exit_code(results.document, strict=True)
    finally:
        if options.study_command and begun:
            _start_study_command(options.study_command, shown, results)
    tiny = plan.study == "ratio" and plan.base.values["MODEL_SIZE"] == "tiny"
    if results and code == EXIT_DONE and tiny:
        what = "the study at GPT-2 size, on a GPU: make defconfig-gpt2-ratio-ablation && make"
        log("NEXT", what)
    return code, text


def _start_study_command(words: Sequence[str], plan: Plan, results: StudyResults | None) -> None:
    """Start ON_STUDY_DONE_CMD with the study's document; a failure is a warning."""
    try:
        document = results.document if results else judged_document(plan)
    # Such as a damaged record, which the study's own report names too.
    except (KablateError, OSError) as error:
        log("WARN", f"{plan.folder.name}   {words[0]} not started: {error}")
    else:
        feed_command(words, json_document(SCHEMA_VERSION, document), plan.folder.name)


def _train_looks(
    plan: Plan, options: RunnerOptions, begun: list[Plan]
) -> tuple[int, StudyResults | None]:
    """Train the runs of a plan of SEEDS=auto, look by look. Return exit code and results.

    After a look, further seeds are trained for the comparisons without a word. The run directories
    and the declarations are the only state, so an interrupted study goes on where it was.
    """
    attempted: set[Path] = set()
    code = EXIT_DONE
    while True:
        # A failed run is tried once per command, as with a list of seeds.
        runs = [run for run in plan.runs if run.path not in attempted]
        outcome = train_runs(plan, runs, options, begun)
        if outcome in _INTERRUPTED_CODES:
            return outcome, None
        code = max(code, outcome)
        attempted.update(run.path for run in runs)
        results = write_results(table_plan(plan))
        _log_look(results)
        before = plan.auto
        plan = with_runs(plan, seeds=AUTO_SEEDS)
        assert before is not None and plan.auto is not None
        if not plan.auto.looks or plan.auto.number == before.number:
            break
    if plan.auto.looks:
        what = f"at {plan.auto.looks[0]} seeds waits until each of their runs has ended"
        log("LOOK", f"{what}; type: make SEEDS=auto")
    elif results.study.judged["baseline_diverged"]:
        code = max(code, EXIT_FAILED)
    return code, results


def _log_look(results: StudyResults) -> None:
    """Log the look that was taken, and each new word."""
    judged, look = results.study.judged, results.study.plan.taken
    if look is None:
        return
    kind = "" if look.planned else ", unplanned"
    waiting = len(judged["family"].keys() - judged["closed"][-1])
    log(
        "LOOK",
        f"{look.number}: n={look.n}, {look.share:g} of alpha{kind}; {waiting} comparisons open",
    )
    for verdict in results.document["verdicts"]:
        if verdict["look"] == look.number and verdict["verdict"] in LASTING_WORDS:
            log("LOOK", "  ".join(column.text(verdict) for column in VERDICTS if column.text))


def train_runs(
    plan: Plan, runs: Sequence[Run[Config]], options: RunnerOptions, begun: list[Plan] | None = None
) -> int:
    """Train unfinished ``runs`` of ``plan`` in training order and return the exit code.

    The plan is added to ``begun`` before the first of them starts.
    """
    for problem in plan.left_out:
        log("OMIT", f"{plan.study}/{problem}")

    def before_first() -> None:
        if begun is not None:
            begun.append(plan)
        if plan.judged:
            declare(declared_verdicts(plan))

    keeps_stale = options.stale == "keep"
    backend = Gpt2Backend(
        plan, allow_stale=keeps_stale, dirty=options.dirty, before_first=before_first
    )
    return run_with(backend, plan, training_order(runs), options)


def run_with(
    backend: Gpt2Backend, plan: Plan, runs: Sequence[Run[Config]], options: RunnerOptions
) -> int:
    """Train ``runs`` with the time limits and the leases of the plan; return the exit code."""
    base = plan.base
    options = replace(
        options,
        time_limit=base.run_time_limit_seconds,
        stall_limit=base.stall_limit_seconds,
        lease_seconds=base.lease_seconds,
    )
    return run_all(runs, plan.folder, backend, options)


def train_here(plan: Plan, options: RunnerOptions) -> int:
    """Train the plan's only run in this process.

    Of ``options``, those of one run apply. Returns the exit code. torchrun starts one process per rank;
    the others wait for rank 0 in ``train_run``. Raises ConfigError if the plan has more than one run, or
    another process trains the run.
    """
    if len(plan.runs) != 1:
        what = f"one process trains a single run (expected 1 planned run, got {len(plan.runs)})"
        advice = "type: gpt2/train_ra_mla.py --ra-mla-ablation-step 7 --seed 1 --in-process"
        raise ConfigError(Problem(what, plan.study, advice, code="usage.not-one-run"))
    (run,) = plan.runs
    require_matching_directories([run])
    if RunRecord(RunDir(run.path)).is_done:
        log("SKIP", f"{run.label}   done; to repeat it: make rerun RUNS={run.variant.slug}")
        return EXIT_DONE
    # Set before torch is imported: libraries read these variables once, at import.
    os.environ.update(worker_environment(run.config.machine))
    from gpt2.training.loop import train_run

    process = current_process()
    require_world_size(process, run.config.train.gpus)
    if process.is_main:
        place = TrainingPlace(plan.build_dir, plan.folder, options.dirty)
        check_machine([run.config], place, jobs=1)
    # A single process may be one in a debugger, which stops it.
    limit = plan.base.stall_limit_seconds if process.world_size > 1 else 0
    with SignalCounter() as interrupts, ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        guard = guard_of_other_ranks(RunDir(run.path))

        def stopped() -> bool:
            if limit:
                # Called for each micro-batch, or a thread that needs no lock of a hanging interpreter
                # writes all stacks and ends this process.
                faulthandler.dump_traceback_later(limit, exit=True)
            return interrupts.count > 0

        if process.is_main:
            check_weights([run.config], plan.build_dir)
            check_data([run.config], plan.build_dir)
            run.path.mkdir(parents=True, exist_ok=True)
            guard = stack.enter_context(take_lease(RunDir(run.path), plan.base.lease_seconds))
            Gpt2Backend(plan).write_inputs(run)
            stack.enter_context(warnings_in(RunDir(run.path).logs))
        status = train_run(
            run.path,
            plan.build_dir,
            lambda event: _log_event(run, event),
            stopped,
            guard,
            allow_stale=options.stale == "keep",
        )
    if status.state is not State.SUCCESS:
        tag = "STOP" if status.state is State.INTERRUPTED else "FAIL"
        log(tag, f"{status.message}   log: {RunDir(run.path).logs}")
    return status.exit_code


def rerun(plan: Plan, patterns: str, *, yes: bool = False) -> Plan:
    """Move the directories of the matching runs aside, after a confirmation; return their plan.

    Raises ConfigError if a pattern matches no run, or a run is active.
    """
    runs = plan.matching(patterns)
    for run in runs:
        require_free(RunDir(run.path))
    # Results reused from another directory stay there; the run is trained again in this folder.
    runs = [replace(run, path=plan.folder / run.name) for run in runs]
    existing = [run for run in runs if run.path.exists()]
    if existing:
        question = f"train {len(existing)} of {len(plan.runs)} runs again (old results are kept)?"
        confirm(question, yes)
    for run in existing:
        log("RERUN", f"{run.label}   old run moved to {set_aside(RunDir(run.path)).name}")
    return replace(plan, runs=runs)


def _log_event(run: Run[Config], event: dict[str, Any]) -> None:
    """Log one line per event, without a label: only one run is trained."""
    if event["kind"] == "line":
        log(event["tag"], event["text"])
    elif event["kind"] == "progress":
        progress = RunProgress(run)
        progress.update(event)
        log("TRAIN", progress.describe())
