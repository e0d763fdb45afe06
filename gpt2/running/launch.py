"""The training backend: everything that the generic runner needs to train GPT-2 runs."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.records.files import write_resolved_config
from gpt2.records.listing import other_configurations
from gpt2.running import PRELOADED_MODULES
from gpt2.running.preflight import (
    TrainingPlace,
    check_data,
    check_machine,
    check_weights,
    gpu_name,
)
from gpt2.running.studies_index import write_index
from gpt2.running.study_end import command_at_end
from gpt2.study.document import study_document_of
from gpt2.study.looks import AUTO_SEEDS
from gpt2.study.plan import Plan, declared_verdicts, planned_looks, table_plan, with_runs
from lib.config.dotconfig import ConfigWorkspace, ExplicitSetting, explicit_settings
from lib.console import confirm, is_verbose, log, terminal_columns
from lib.env.gpu import cpu_model
from lib.env.machine import require_world_size, worker_environment
from lib.env.ranks import current_process
from lib.env.snapshot import copy_snapshot
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import size_bytes
from lib.project import ROOT
from lib.report.columns import to_json, to_markdown, write_tables
from lib.report.page import write_report
from lib.report.series import study_series
from lib.report.study_verdicts import LASTING_WORDS, StudyVerdicts, declare
from lib.report.table import ResultTable, build_table
from lib.report.terminal import to_terminal, training_text
from lib.report.text import (
    LINE_WIDTH,
    Document,
    verdict_line,
    verdict_lines,
    verdict_table,
    verdicts_exit_code,
)
from lib.runner.display import RunProgress
from lib.runner.job import DeviceSlot, Executor, Job, JobLimits, watchdog
from lib.runner.local import LocalExecutor
from lib.runner.queue import belongs_to_different_run, require_matching_directories, set_aside
from lib.runner.runner import RunnerOptions, run_all
from lib.runner.signals import SignalCounter
from lib.runner.worker import train_worker, warnings_in
from lib.runs.code import TreeDigests, run_drift
from lib.runs.lease import guard_of_other_ranks, require_free, take_lease
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant, training_order
from lib.runs.run_dir import RunDir, State, read_status
from lib.tracking.verdict_run import send_verdicts
from lib.units import format_duration


class Gpt2Backend:
    """Implementation of ``lib.runner.runner.TrainingBackend`` for the GPT-2 trainer."""

    def __init__(
        self,
        plan: Plan,
        executor: LocalExecutor,
        *,
        allow_stale: bool = False,
        dirty: bool = False,
        settings: Mapping[str, ExplicitSetting] | None = None,
        before_first: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the backend of the runs of ``plan``.

        ``allow_stale`` allows resuming from checkpoints written by other code, ``dirty`` uncommitted
        code. ``settings`` are the recorded sources of the settings, by default those of ``.config``.
        ``before_first`` is called before the first run starts.
        """
        self._before_first = cache(before_first)
        self._place = TrainingPlace(plan.build_dir, plan.folder, dirty)
        self._machine = plan.base.machine
        self._executor = executor
        self._settings = settings
        self._train = partial(train_in_worker, build_dir=plan.build_dir, allow_stale=allow_stale)
        self._plan = plan
        self._tree = TreeDigests()

    def preflight(self, runs: Sequence[Run[Config]], jobs: int) -> Sequence[DeviceSlot]:
        """Check the machine in a worker, then weights and data; return the slots for runs.

        The machine is checked first, so that nothing is downloaded to an unsuitable machine.
        """
        configs = [run.config for run in runs]
        written = sum(self._written_bytes(RunDir(run.path)) for run in runs)
        place = replace(self._place, written_bytes=written)
        slots = self._executor.call(check_machine, configs, place, jobs)
        check_weights(configs, self._place.build_dir)
        check_data(configs, self._place.build_dir)
        return slots

    def _written_bytes(self, run: RunDir) -> int:
        """Return the size of the files of a run that will be resumed, else 0."""
        status = read_status(run)
        resumed = status is not None and status.state in (State.RUNNING, State.INTERRUPTED)
        if not resumed or self.drift(run):
            return 0
        return size_bytes(run.path)

    def drift(self, run: RunDir) -> Sequence[str]:
        """Return the source files, torch version and device model changed since ``run``."""
        return run_drift(RunRecord(run), self._device, self._tree)

    def is_stale(self, record: RunRecord) -> bool:
        """Return whether other code, torch or device made a result."""
        return bool(run_drift(record, self._device, self._tree))

    @cached_property
    def _positions(self) -> Mapping[Path, Mapping[str, float]]:
        return _positions(self._plan)

    def submit(self, run: Run[Config], slot: DeviceSlot, executor: Executor, token: int) -> Job:
        """Write the inputs of the run, and start ``GPUS`` processes for it, also on a CPU."""
        self._before_first()
        self.write_inputs(run)
        order = {**self._positions[run.path], "submitted_at": time.time()}
        return executor.submit(
            train_worker,
            partial(self._train, order=order),
            run.path,
            token,
            world_size=run.config.train.gpus,
            # Read by the worker's libraries at import.
            environment={**worker_environment(run.config.machine), **slot},
        )

    def write_inputs(self, run: Run[Config]) -> None:
        """Write resolved_config.yaml, the worker's input, and the environment snapshot.

        The request that stopped an earlier process is deleted; a later one stops the run, also while
        it starts.
        """
        RunDir(run.path).stop_request.unlink(missing_ok=True)
        settings = self._settings
        if settings is None:
            place = ConfigWorkspace(ROOT, self._place.build_dir)
            settings = explicit_settings(place.config, run.config.values, run.label)
        write_resolved_config(RunDir(run.path), run.config, settings)
        if run.config.environment.snapshot:
            copy_snapshot(self._place.build_dir, RunDir(run.path))

    @cached_property
    def _device(self) -> str:
        if self._machine.device == "cpu":
            return cpu_model()
        return self._executor.call(gpu_name)


def train_in_worker(
    run_dir: Path,
    report: Callable[[Mapping[str, Any]], None],
    stop: Callable[[], bool],
    guard: Callable[[], None],
    *,
    build_dir: Path,
    allow_stale: bool,
    order: Mapping[str, float],
) -> None:
    """Train the run of a directory in a worker; the parent process imports no torch."""
    from gpt2.train import train_run

    train_run(run_dir, build_dir, report, stop, guard, allow_stale=allow_stale, order=order)


def _positions(plan: Plan) -> dict[Path, dict[str, float]]:
    """Return the place of each run in the training order: its block (seed), and which one in it."""
    positions: dict[Path, dict[str, float]] = {}
    last = Counter[int]()
    for run in training_order(plan.runs):
        last[run.seed] += 1
        positions[run.path] = {"block": run.seed, "position": last[run.seed]}
    return positions


# Execution of a plan: train its runs in workers, train one run in this process, rerun runs.


# Exit codes of an interrupted plan: training will be resumed, so no table is written yet.
_INTERRUPTED_CODES = range(124, 256)


def train_plan(
    plan: Plan,
    options: RunnerOptions,
    table_of: Plan,
    *,
    json: bool = False,
    strict: bool = False,
) -> tuple[int, str]:
    """Train the unfinished runs of ``plan``. Return the exit code and the result table.

    ``table_of`` is the plan whose runs the table shows. If ``strict``, the exit code of finished
    runs is that of their verdicts. ConfigError and PreflightError are raised before anything is
    created.
    """
    with command_at_end(options.study_command, plan.folder, lambda: _document(table_of)):
        code = _train_runs(plan, plan.runs, options)
        if code in _INTERRUPTED_CODES:
            return code, ""
        table, document = _study(table_of)
        text = _reported(table_of, table, document, json)
        if strict:
            code = code or verdicts_exit_code(document, strict=True)
    if code == EXIT_DONE and plan.study == "ratio" and plan.base.values["MODEL_SIZE"] == "tiny":
        log(
            "NEXT",
            "the study at GPT-2 size, on a GPU: make defconfig-gpt2-ratio-ablation && make",
        )
    return code, text


def train_free_runs(plan: Plan, options: RunnerOptions) -> int:
    """Train runs of ``plan`` until each is done or trained by another process; return the exit code.

    Writes no table.
    """
    return _train_runs(plan, plan.runs, replace(options, wait=False))


def train_looks(
    plan: Plan,
    options: RunnerOptions,
    *,
    json: bool = False,
    strict: bool = False,
) -> tuple[int, str]:
    """Train the runs of a plan of SEEDS=auto, look by look. Return exit code and result table.

    After a look, further seeds are trained for the comparisons without a word. The run directories
    and the record of the verdicts are the only state, so an interrupted study goes on where it was.
    """
    with command_at_end(options.study_command, plan.folder, lambda: _document(table_plan(plan))):
        attempted: set[Path] = set()
        code = EXIT_DONE
        while True:
            # A failed run is tried once per command, as with a list of seeds.
            runs = [run for run in plan.runs if run.path not in attempted]
            outcome = _train_runs(plan, runs, options)
            if outcome in _INTERRUPTED_CODES:
                return outcome, ""
            code = max(code, outcome)
            attempted.update(run.path for run in runs)
            shown = table_plan(plan)
            table, document = _study(shown)
            _log_look(table.verdicts, document)
            before = plan.auto
            plan = with_runs(plan, seeds=AUTO_SEEDS)
            assert before is not None and plan.auto is not None
            if not plan.auto.looks or plan.auto.number == before.number:
                break
        if plan.auto.looks:
            what = f"at {plan.auto.looks[0]} seeds waits until each of their runs has ended"
            log("LOOK", f"{what}; type: make SEEDS=auto")
        else:
            log("LOOK", _saving(plan, table))
            ended = table.verdicts.baseline_diverged
            code = max(code, EXIT_FAILED if ended else EXIT_DONE)
        if strict:
            code = code or verdicts_exit_code(document, strict=True)
        return code, _reported(shown, table, document, json)


def _document(plan: Plan) -> dict[str, Any]:
    return study_document_of(plan, result_table(plan))


def _train_runs(plan: Plan, runs: Sequence[Run[Config]], options: RunnerOptions) -> int:
    """Train unfinished ``runs`` of ``plan`` in training order and return the exit code."""
    _log_skipped(plan)
    executor = new_executor(plan)
    backend = Gpt2Backend(
        plan,
        executor,
        allow_stale=options.stale == "keep",
        dirty=options.dirty,
        before_first=partial(_declare, plan),
    )
    return run_all(training_order(runs), plan.folder, backend, executor, _limited(options, plan))


def _declare(plan: Plan) -> None:
    """Declare rule, looks, seeds and comparisons of the study beside its runs."""
    if plan.judged:
        declare(declared_verdicts(plan))


def _limited(options: RunnerOptions, plan: Plan) -> RunnerOptions:
    """Return ``options`` with the time limits and the leases of the plan's runs."""
    base = plan.base
    limits = JobLimits(base.run_time_limit_seconds, base.stall_limit_seconds)
    return replace(options, limits=limits, lease_seconds=base.lease_seconds)


def _log_look(study: StudyVerdicts, document: Document) -> None:
    """Log the look that was taken, and each new word."""
    look = study.plan.taken
    if look is None:
        return
    kind = "" if look.planned else ", unplanned"
    waiting = len(study.family.keys() - study.closed[-1])
    log(
        "LOOK",
        f"{look.number}: n={look.n}, {look.share:g} of alpha{kind}; {waiting} comparisons open",
    )
    for verdict in document["verdicts"]:
        if verdict["look"] == look.number and verdict["verdict"] in LASTING_WORDS:
            for line in verdict_line(verdict, LINE_WIDTH - len("LOOK    ")).splitlines():
                log("LOOK", line)


def _saving(plan: Plan, table: ResultTable) -> str:
    """Return how many runs and hours the looks saved against all seeds of the last look."""
    seeds = max(*planned_looks(plan).seeds, len({run.seed for run in plan.runs}))
    trained = Counter(run.variant.slug for run in plan.runs)
    spare = {v.slug: seeds - trained[v.slug] for v in plan.variants}
    seconds = {row["slug"]: row["train_seconds"] or 0.0 for row in table.rows}
    hours = format_duration(sum(n * seconds.get(slug, 0.0) for slug, n in spare.items()))
    total = seeds * len(plan.variants)
    return (
        f"saved {sum(spare.values())} of {total} runs, {hours} of training, against {seeds} seeds"
    )


def report(
    plan: Plan,
    whole: Plan,
    *,
    selected: bool,
    json: bool = False,
    label_by: Sequence[str] = (),
) -> str:
    """Write table and report of the runs of ``whole``. Return the table as text.

    If ``selected``, the text is the table of ``plan``, a part of ``whole``. Runs that differ in a
    field of ``label_by`` get separate rows. Raises ConfigError if a field is unknown.
    """
    table, document, path = _written(plan, whole, label_by)
    if selected:
        table, document = _part(plan, table)
    return _shown(plan, table, document, path, json)


def _written(
    plan: Plan, whole: Plan, label_by: Sequence[str]
) -> tuple[ResultTable, Document, Path]:
    """Write tables and report of ``whole``; return the results, their document, and the report.

    The number of seeds in a folder is not a declaration: a look needs the seeds of ``plan``.
    """
    declared = {run.seed for run in plan.runs} >= {run.seed for run in whole.runs}
    table, document = _study(whole, label_by, looks=declared and not label_by)
    return table, document, _published(whole, table, document)


def _part(plan: Plan, table: ResultTable) -> tuple[ResultTable, Document]:
    """Return the rows of ``plan`` in the table of its whole study, and their document."""
    shown = table.of_runs({run.path for run in plan.runs})
    return shown, study_document_of(plan, shown)


def _reported(plan: Plan, table: ResultTable, document: Document, json: bool) -> str:
    """Write the report. Return the table as text, which names the report below it."""
    return _shown(plan, table, document, _published(plan, table, document), json)


def _published(plan: Plan, table: ResultTable, document: Document) -> Path:
    """Write report and index and return the path of the report; send the verdicts to the trackers."""
    path = write_report(document, study_series(table), plan.folder)
    log("INDEX", str(write_index(plan, document, result_table)))
    if not document["exploratory"]:
        shown, base = verdict_table(document), plan.base
        send_verdicts(plan.folder, base.tracking, base.values, shown, partial(log, "WARN"))
    return path


def _shown(plan: Plan, table: ResultTable, document: Document, report: Path, json: bool) -> str:
    """Return the document as JSON, for the columns of a terminal, or else as Markdown."""
    if json:
        log("REPORT", str(report))
        return to_json(document)
    files = f"Report: {report}\n"
    sample = RunDir(plan.runs[0].path).sample
    if len(plan.runs) == 1 and sample.exists():
        files += f"Sample: {sample}\n"
    columns = terminal_columns(sys.stdout)
    if columns is None or is_verbose():
        return f"{to_markdown(document)}\n{files}"
    text = to_terminal(document, columns)
    if len(plan.runs) == 1:
        text += "".join(training_text(series, columns) for series in study_series(table))
    return f"{text}{files}V=1 shows p, the rule, remarks, and all columns and sections\n"


def verdicts(
    plan: Plan, whole: Plan, *, selected: bool, json: bool = False, strict: bool = False
) -> tuple[int, str]:
    """Write result table and report of ``whole``. Return the exit code and the text of the verdicts.

    If ``selected``, these are the verdicts on ``plan``, a part of ``whole``. Raises ConfigError if
    none of its runs has a result; the files are written, so that no word of other runs is left.
    """
    table, document, path = _written(plan, whole, ())
    log("REPORT", str(path))
    if selected:
        _, document = _part(plan, table)
    if not any(run["state"] == "done" or run["diverged"] for run in document["runs"]):
        advice = "type: make, to train the runs, or make status, to see their states"
        raise ConfigError(Problem("no run has a result", plan.study, advice, code="run.not-found"))
    # Such as a damaged run, whose seed then has no result.
    for note in document["notes"]:
        log("NOTE", note)
    text = to_json(document) if json else verdict_lines(document)
    return verdicts_exit_code(document, strict=strict), text


def _study(
    plan: Plan, label_by: Sequence[str] = (), *, looks: bool = True
) -> tuple[ResultTable, Document]:
    """Return the results of all runs of the study, and their document; write document and tables.

    Runs of other configurations are listed below the rows.
    """
    table = result_table(plan, label_by, looks=looks)
    document = study_document_of(plan, table)
    if others := other_configurations(plan):
        document["sections"].append(asdict(others))
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in write_tables(document, plan.folder):
        log("TABLE", str(path))
    return table, document


def result_table(plan: Plan, label_by: Sequence[str] = (), *, looks: bool = False) -> ResultTable:
    """Return the result table of the plan's runs.

    Without ``looks``, nothing is written, and the verdicts are those at the looks declared so far.
    """
    backend = Gpt2Backend(plan, new_executor(plan))
    skipped = [str(problem) for problem in plan.left_out]
    declared = replace(declared_verdicts(plan), exploratory=not looks)
    table = build_table(plan.study, plan.runs, backend.is_stale, skipped, label_by, declared)
    return replace(table, plan_note=plan.note)


def train_here(plan: Plan, options: RunnerOptions) -> int:
    """Train the plan's only run in this process.

    A debugger can reach all of the training. Of ``options``, those of one run apply. Returns the exit
    code. torchrun starts one process per rank; the other ranks wait for rank 0 in ``train.run``.
    Raises ConfigError if the plan has more than one run, or another process trains the run.
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
    from gpt2 import train

    process = current_process()
    require_world_size(process, run.config.train.gpus)
    if process.is_main:
        place = TrainingPlace(plan.build_dir, plan.folder, options.dirty)
        check_machine([run.config], place, jobs=1)
    # A single process may be one in a debugger, which stops it.
    limit = plan.base.stall_limit_seconds if process.world_size > 1 else 0
    with SignalCounter() as interrupts, watchdog(limit) as alive, ExitStack() as stack:
        guard = guard_of_other_ranks(RunDir(run.path))

        def stopped() -> bool:
            alive()
            return interrupts.stopped

        if process.is_main:
            check_weights([run.config], plan.build_dir)
            check_data([run.config], plan.build_dir)
            run.path.mkdir(parents=True, exist_ok=True)
            guard = stack.enter_context(take_lease(RunDir(run.path), plan.base.lease_seconds))
            Gpt2Backend(plan, new_executor(plan)).write_inputs(run)
            stack.enter_context(warnings_in(RunDir(run.path).logs))
        status = train.train_run(
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
    """Move the directories of the matching runs aside. Return the plan of the matching runs.

    Requires a confirmation. Raises ConfigError if stdin is not interactive, a pattern matches no
    run, or a run is active.
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


def new_executor(plan: Plan) -> LocalExecutor:
    """Return the executor of the runs of ``plan``."""
    return LocalExecutor(PRELOADED_MODULES, worker_environment(plan.base.machine))


def _log_skipped(plan: Plan) -> None:
    for problem in plan.left_out:
        log("OMIT", f"{plan.study}/{problem}")


def _log_event(run: Run[Config], event: dict[str, Any]) -> None:
    """Log one line per event, without a label: only one run is trained."""
    if event["kind"] == "line":
        log(event["tag"], event["text"])
    elif event["kind"] == "progress":
        progress = RunProgress(run)
        progress.update(event)
        log("TRAIN", progress.describe())


# Standalone training: runs outside any plan of ``.config``, used to repeat and compare runs.


def scratch_plan(config: Config, names: Sequence[str], folder: Path, build_dir: Path) -> Plan:
    """Return a plan that trains ``config`` once for each of ``names``, below ``folder``."""
    runs = [
        Run(folder.name, RunVariant(name), config.seed, config, folder / name) for name in names
    ]
    return Plan(folder.name, folder, build_dir, config, runs)


def train_scratch(
    plan: Plan, settings: Mapping[str, ExplicitSetting] | None = None, *, anew: bool = True
) -> int:
    """Train the runs of ``plan`` and return the exit code.

    ``settings`` are the recorded sources of the settings. Finished and damaged runs are moved aside.
    Started runs are resumed, unless ``anew``. ConfigError and PreflightError are raised before anything is
    trained.
    """
    for run in plan.runs:
        state = RunRecord(RunDir(run.path)).state
        if run.path.exists() and (
            anew or state in ("done", "damaged") or belongs_to_different_run(run)
        ):
            aside = set_aside(RunDir(run.path))
            log("RERUN", f"{run.path.name}   old run moved to {aside.name}")
    executor = new_executor(plan)
    # Uncommitted code is allowed: the caller compares every source file with the original run.
    backend = Gpt2Backend(plan, executor, dirty=True, settings=settings or {})
    options = _limited(RunnerOptions(stale="rerun"), plan)
    return run_all(plan.runs, plan.folder, backend, executor, options)
