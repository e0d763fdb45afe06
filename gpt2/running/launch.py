"""The training backend: everything that the generic runner needs to train GPT-2 runs."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.planning.plan import EAGER, Plan
from gpt2.records.run_files import write_resolved_config
from gpt2.records.sections import sections
from gpt2.running.preflight import TrainingPlace, check_data, check_weights
from lib.config.dotconfig import ConfigWorkspace, ExplicitSetting, explicit_settings
from lib.config.field import SymbolValue
from lib.console import confirm, log
from lib.env.gpu import cpu_model
from lib.env.machine import require_world_size, worker_environment
from lib.env.ranks import current_process
from lib.env.snapshot import copy_snapshot
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.plan.run import PlannedRun, RunVariant, default_run_path
from lib.project import ROOT
from lib.report.leaderboard import record_reused_runs
from lib.report.render import table_to_json, table_to_markdown, write_table
from lib.report.table import build_table
from lib.runner import locks
from lib.runner.display import RunProgress
from lib.runner.locks import SignalCounter
from lib.runner.pool import DeviceSlot, WorkerPool
from lib.runner.runner import (
    LOCK_FILE,
    RunnerOptions,
    archive_run,
    belongs_to_different_run,
    require_matching_directories,
    run_all,
)
from lib.runs.code import run_drift
from lib.runs.run_dir import RunDir, is_done, read_status
from lib.tracking.options import TRACKERS

# Modules that each worker would otherwise import itself; optimizers import torch._dynamo on first use.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "gpt2.train",
    "gpt2.running.preflight",
)
# fp32 weights; a checkpoint adds Adam's two moments of the same size.
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
# Allowance per run for records, tables and file system overhead.
_MARGIN_BYTES = 1 << 20


class Gpt2Target:
    """Implementation of ``lib.runner.pool.TrainingBackend`` for the GPT-2 trainer."""

    function = "gpt2.train:train_run"

    def __init__(
        self, plan: Plan, pool: WorkerPool, *, allow_stale: bool = False, dirty: bool = False
    ) -> None:
        self.build_dir: Path = plan.build_dir
        # Allow resuming from checkpoints written by other code.
        self.arguments: Mapping[str, Any] = {"allow_stale": allow_stale}
        self._place = TrainingPlace(plan.build_dir, plan.folder, dirty)
        self._machine = plan.base.machine
        self._pool = pool

    def preflight(
        self, pool: WorkerPool, runs: Sequence[PlannedRun[Config]]
    ) -> Sequence[DeviceSlot]:
        """Check the machine in a worker, then weights and data; return the slots for runs.

        The machine is checked first, so that nothing is downloaded to an unsuitable machine.
        """
        configs = [run.config for run in runs]
        slots: Sequence[DeviceSlot] = pool.call(
            "gpt2.running.preflight:check_machine", configs, self._place
        )
        check_weights(configs, self.build_dir)
        check_data(configs, self.build_dir)
        return slots

    def bytes_needed(self, runs: Sequence[PlannedRun[Config]], jobs: int) -> int:
        """Return the disk space for all final weights and the checkpoints of ``jobs`` runs."""
        weights = [run.config.model.num_params() * _BYTES_PER_PARAMETER for run in runs]
        # Plus one: the oldest checkpoint is deleted after the new one has been verified.
        checkpoints = max(run.config.train.checkpoint_keep + 1 for run in runs)
        largest = sorted(weights)[-jobs:]
        checkpoint_bytes = _CHECKPOINT_COPIES * checkpoints * sum(largest)
        return sum(weights) + checkpoint_bytes + _MARGIN_BYTES * len(runs)

    def differences(self, run: RunDir) -> Sequence[str]:
        """Return the source files, torch version and device model changed since ``run``."""
        return run_drift(run, self._device)

    def prepare(self, run: PlannedRun[Config]) -> None:
        """Write resolved_config.yaml, the worker's input, and the environment snapshot."""
        write_resolved_config(RunDir(run.path), run.config, self.settings(run))
        if run.config.environment.snapshot:
            copy_snapshot(self.build_dir, RunDir(run.path))

    def settings(self, run: PlannedRun[Config]) -> Mapping[str, ExplicitSetting]:
        """Return the source of each non-default setting of the run."""
        place = ConfigWorkspace(ROOT, self.build_dir)
        return explicit_settings(place.config, run.config.values, run.label)

    def processes(self, run: PlannedRun[Config]) -> int:
        """Return the number of processes: ``GPUS``, also on a CPU."""
        return run.config.train.gpus

    def environment(self, run: PlannedRun[Config]) -> Mapping[str, str]:
        """Return the environment variables that the worker's libraries read at import."""
        return worker_environment(run.config.machine)

    @cached_property
    def _device(self) -> str:
        if self._machine.device == "cpu":
            return cpu_model()
        return str(self._pool.call("gpt2.running.preflight:gpu_name"))


# Execution of a plan: train its runs in workers, train one run in this process, rerun runs.


# Exit codes of an interrupted plan: training will be resumed, so no table is written yet.
_INTERRUPTED_CODES = range(124, 256)


def train_plan(
    plan: Plan, options: RunnerOptions, table_of: Plan, *, json: bool = False
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
        log(
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
        log("TABLE", str(path))
    if plan.sweep is not None:
        record_reused_runs(plan.folder, [run.path for run in plan.runs])
    return table_to_json(table) if json else table_to_markdown(table)


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
    require_matching_directories([run])
    if is_done(RunDir(run.path)):
        log("SKIP", f"{run.label}   done; to repeat it: make rerun RUNS={run.variant.slug}")
        return EXIT_DONE
    # Set before torch is imported: libraries read these variables once, at import.
    os.environ.update(worker_environment(run.config.machine))
    from gpt2 import train
    from gpt2.running import preflight

    process = current_process()
    require_world_size(process, run.config.train.gpus)
    if process.is_main:
        preflight.check_machine(
            [run.config], preflight.TrainingPlace(plan.build_dir, plan.folder, dirty)
        )
    with SignalCounter() as interrupts, ExitStack() as lock:
        if process.is_main:
            preflight.check_weights([run.config], plan.build_dir)
            preflight.check_data([run.config], plan.build_dir)
            run.path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locks.acquire_lock(RunDir(run.path).lock))
            Gpt2Target(plan, new_pool(plan)).prepare(run)
        status = train.train_run(
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
    locks.require_unlocked(plan.folder / LOCK_FILE)
    # Results reused from another directory stay there; the run is trained again in this folder.
    runs = [replace(run, path=default_run_path(run, plan.folder)) for run in runs]
    existing = [run for run in runs if run.path.exists()]
    if existing:
        question = f"train {len(existing)} of {len(plan.runs)} runs again (old results are kept)?"
        confirm(question, yes)
    for run in existing:
        log("RERUN", f"{run.label}   old run moved to {archive_run(RunDir(run.path)).name}")
    return replace(plan, runs=runs)


def new_pool(plan: Plan) -> WorkerPool:
    """Return a pool of workers for the runs of ``plan``."""
    return WorkerPool(PRELOAD, worker_environment(plan.base.machine))


def _log_skipped(plan: Plan) -> None:
    for problem in plan.left_out:
        log("OMIT", f"{plan.study}/{problem}")


def _log_event(run: PlannedRun[Config], event: dict[str, Any]) -> None:
    """Log one line per event, without a label: only one run is trained."""
    if event["kind"] == "line":
        log(event["tag"], event["text"])
    elif event["kind"] == "progress":
        progress = RunProgress(run)
        progress.update(event)
        log("TRAIN", progress.describe())


# Standalone training: runs outside any plan of ``.config``, used to repeat and compare runs.


# Symbols whose values are paths, relative to the build folder unless absolute.
_PATH_SYMBOLS = ("CUSTOM_PATH", "DATASET_PATH", "INIT_FROM")


def scratch_plan(config: Config, names: Sequence[str], folder: Path, build_dir: Path) -> Plan:
    """Return a plan that trains ``config`` once for each of ``names``, below ``folder``."""
    runs = [
        PlannedRun(folder.name, RunVariant(name), config.seed, config, folder / name)
        for name in names
    ]
    return Plan(folder.name, folder, build_dir, config, runs)


class _Target(Gpt2Target):
    """Training backend for runs that are not planned by ``.config``."""

    def __init__(
        self, plan: Plan, pool: WorkerPool, recorded: Mapping[str, ExplicitSetting]
    ) -> None:
        # Uncommitted code is allowed: the caller compares every source file with the original run.
        super().__init__(plan, pool, dirty=True)
        self._recorded = recorded

    def settings(self, run: PlannedRun[Config]) -> Mapping[str, ExplicitSetting]:
        """Return the recorded settings of the original run."""
        return self._recorded


def train_scratch(
    plan: Plan, settings: Mapping[str, ExplicitSetting] | None = None, *, anew: bool = True
) -> int:
    """Train the runs of ``plan`` and return the exit code.

    ``settings`` are the recorded sources of the settings. Finished runs are moved aside. Started
    runs are resumed, unless ``anew``. ConfigError and PreflightError are raised before anything is
    trained.
    """
    for run in plan.runs:
        if run.path.exists() and (
            anew or is_done(RunDir(run.path)) or belongs_to_different_run(run)
        ):
            aside = archive_run(RunDir(run.path))
            log("RERUN", f"{run.path.name}   old run moved to {aside.name}")
    pool = new_pool(plan)
    target = _Target(plan, pool, settings or {})
    return run_all(plan.runs, plan.folder, target, pool, RunnerOptions(stale="rerun"))


def unobserved(values: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return ``values`` without trackers and time limit, which cannot change a bit of the result."""
    trackers_off = dict.fromkeys(TRACKERS.symbols(), False)
    return {**values, **trackers_off, "RUN_TIME_LIMIT_SECONDS": 0}


def with_data(config: Config, data: str, folder: Path, build_dir: Path) -> tuple[Config, Path]:
    """Return ``config`` adapted to the data at ``data``, and the build folder to train it in.

    ``data`` is a data folder (as in DATA_DIR) or the text of a custom data set (as in CUSTOM_PATH);
    "" changes nothing. Raises ConfigError if ``data`` is missing or does not match the run.
    """
    if not data:
        return config, build_dir
    path = Path(data).absolute()
    if not path.exists():
        what, advice = "no such file or folder", "type: make reproduce DATA=DIR"
        raise ConfigError(Problem(what, data, advice, code="data.missing"))
    custom = config.data.dataset == "custom"
    if custom and _is_data_folder(path) and not (build_dir / config.data.custom_path).exists():
        # The name of a custom data set is derived from its text, so the text is required.
        what = f"missing text {config.data.custom_path} of the run (expected a text, got a folder)"
        advice = "type: make reproduce DATA=THE_TEXT"
        raise ConfigError(Problem(what, str(path), advice, code="data.missing"))
    if not custom or _is_data_folder(path):
        return Config.from_values({**config.values, "DATA_DIR": str(path)}), build_dir
    return _with_custom_text(config, path, folder, build_dir)


def _is_data_folder(path: Path) -> bool:
    return (path / "downloads").is_dir() or any(path.glob("*/dataset.json"))


def _with_custom_text(
    config: Config, text: Path, folder: Path, build_dir: Path
) -> tuple[Config, Path]:
    """Create a build folder in which CUSTOM_PATH links to ``text``, and other paths still resolve."""
    custom_path = config.data.custom_path
    if Path(custom_path).is_absolute():
        what = f"the run requires its text at the absolute path {custom_path}"
        advice = f"copy {text} to {custom_path}"
        raise ConfigError(Problem(what, "DATA", advice, code="data.absolute-path"))
    inputs = folder / "inputs"
    for name in _PATH_SYMBOLS:
        path = str(config.values[name])
        if not path or Path(path).is_absolute():
            continue
        target = text if name == "CUSTOM_PATH" else (build_dir / path).absolute()
        link = inputs / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        if target.exists():
            link.symlink_to(target)
    data_dir = str((build_dir / config.data.data_dir).absolute())
    return Config.from_values({**config.values, "DATA_DIR": data_dir}), inputs
