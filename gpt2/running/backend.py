"""The training backend: everything that the generic runner needs to train GPT-2 runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.records.files import write_resolved_config
from gpt2.running import PRELOADED_MODULES
from gpt2.running.preflight import (
    TrainingPlace,
    check_data,
    check_machine,
    check_weights,
    gpu_name,
)
from gpt2.study.plan import Plan
from lib.config.dotconfig import ConfigWorkspace, ExplicitSetting, explicit_settings
from lib.env.gpu import VISIBLE, cpu_model
from lib.env.machine import worker_environment
from lib.env.preflight import require_usable_gpus
from lib.env.snapshot import copy_snapshot
from lib.errors import KablateError
from lib.files import size_bytes
from lib.project import ROOT
from lib.runner.local import DeviceSlot, Job, LocalExecutor
from lib.runner.worker import train_worker
from lib.runs.code import TreeDigests, run_drift
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, State

# Time in which a GPU answers; a lost one may never do.
_GPU_SECONDS = 60.0


class Gpt2Backend:
    """Implementation of ``lib.runner.runner.TrainingBackend`` for the GPT-2 trainer."""

    def __init__(
        self,
        plan: Plan,
        *,
        allow_stale: bool = False,
        dirty: bool = False,
        settings: Mapping[str, ExplicitSetting] | None = None,
        before_first: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the backend of the runs of ``plan``.

        ``allow_stale`` allows resuming from checkpoints of other code, ``dirty`` uncommitted code.
        ``settings`` are the sources of the settings, by default those of ``.config``. ``before_first`` is
        called before the first run starts.
        """
        self._before_first = cache(before_first)
        self._place = TrainingPlace(plan.build_dir, plan.folder, dirty)
        self._on_cpu = plan.base.machine.device == "cpu"
        self.executor = LocalExecutor(PRELOADED_MODULES, worker_environment(plan.base.machine))
        self._settings = settings
        self._train = partial(train_in_worker, build_dir=plan.build_dir, allow_stale=allow_stale)
        self._tree = TreeDigests()

    def preflight(self, runs: Sequence[Run[Config]], jobs: int) -> Sequence[DeviceSlot]:
        """Check the machine in a worker, then fetch weights and data; return the slots for runs."""
        configs = [run.config for run in runs]
        written = 0
        for record in (RunRecord(RunDir(run.path)) for run in runs):
            resumed = record.status and record.status.state in (State.RUNNING, State.INTERRUPTED)
            if resumed and not self.drift(record):
                written += size_bytes(record.run.path)
        place = replace(self._place, written_bytes=written)
        slots = self.executor.call(check_machine, configs, place, jobs)
        check_weights(configs, self._place.build_dir)
        check_data(configs, self._place.build_dir)
        return slots

    def drift(self, record: RunRecord) -> Sequence[str]:
        return run_drift(record, self._device, self._tree)

    @cached_property
    def _device(self) -> str:
        return cpu_model() if self._on_cpu else self.executor.call(gpu_name)

    def submit(self, run: Run[Config], slot: DeviceSlot, token: int) -> Job:
        """Write the inputs of the run, and start ``GPUS`` processes for it, also on a CPU."""
        self._before_first()
        self.write_inputs(run)
        return self.executor.submit(
            train_worker,
            partial(self._train, order={"submitted_at": time.time()}),
            run.path,
            token,
            world_size=run.config.train.gpus,
            # Read by the worker's libraries at import.
            environment={**worker_environment(run.config.machine), **slot},
        )

    def lost_gpu(self, slot: DeviceSlot) -> str:
        if not VISIBLE & slot.keys():
            return ""
        test = self.executor.submit_call(require_usable_gpus, environment=slot)
        try:
            self.executor.result(test, _GPU_SECONDS)
        except KablateError as error:
            return str(error.problems[0])
        return ""

    def write_inputs(self, run: Run[Config]) -> None:
        """Write resolved_config.yaml, the worker's input, and the environment snapshot."""
        # Of an earlier process; a later one stops the run, also while it starts.
        RunDir(run.path).stop_request.unlink(missing_ok=True)
        settings = self._settings
        if settings is None:
            place = ConfigWorkspace(ROOT, self._place.build_dir)
            settings = explicit_settings(place.config, run.config.values, run.label)
        write_resolved_config(RunDir(run.path), run.config, settings)
        if run.config.environment.snapshot:
            copy_snapshot(self._place.build_dir, RunDir(run.path))


def train_in_worker(
    run_dir: Path,
    report: Callable[[Mapping[str, Any]], None],
    stop: Callable[[], bool],
    guard: Callable[[], None],
    **options: Any,
) -> None:
    """Train the run of a directory in a worker, which imports torch."""
    from gpt2.training.loop import train_run

    train_run(run_dir, report=report, stop=stop, guard=guard, **options)
