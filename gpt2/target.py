"""The training backend: everything that the generic runner needs to train GPT-2 runs."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.planning import Plan
from gpt2.preflight import TrainingPlace, check_data, check_weights
from gpt2.runs import write_resolved_config
from lib.environment.record import keep_snapshot
from lib.kconfig.place import Place
from lib.kconfig.settings import Setting, settings
from lib.machine.devices import cpu_model
from lib.machine.setup import environment
from lib.plan import Run
from lib.project import ROOT
from lib.repro.stale import changes_since
from lib.rundir import RunDir
from lib.runner.pool import Pool
from lib.runner.target import Slot

# Modules that each worker would otherwise import itself; optimizers import torch._dynamo on first use.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "gpt2.train",
    "gpt2.preflight",
)
# fp32 weights; a checkpoint adds Adam's two moments of the same size.
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
# Allowance per run for records, tables and file system overhead.
_MARGIN_BYTES = 1 << 20


class Gpt2Target:
    """Implementation of ``lib.runner.target.Target`` for the GPT-2 trainer."""

    function = "gpt2.train:run"

    def __init__(
        self, plan: Plan, pool: Pool, *, allow_stale: bool = False, dirty: bool = False
    ) -> None:
        self.build_dir: Path = plan.build_dir
        # Allow resuming from checkpoints written by other code.
        self.arguments: Mapping[str, Any] = {"allow_stale": allow_stale}
        self._place = TrainingPlace(plan.build_dir, plan.folder, dirty)
        self._machine = plan.base.machine
        self._pool = pool

    def preflight(self, pool: Pool, runs: Sequence[Run[Config]]) -> Sequence[Slot]:
        """Check the machine in a worker, then weights and data; return the slots for runs.

        The machine is checked first, so that nothing is downloaded to an unsuitable machine.
        """
        configs = [run.config for run in runs]
        slots: Sequence[Slot] = pool.call("gpt2.preflight:check_machine", configs, self._place)
        check_weights(configs, self.build_dir)
        check_data(configs, self.build_dir)
        return slots

    def bytes_needed(self, runs: Sequence[Run[Config]], jobs: int) -> int:
        """Return the disk space for all final weights and the checkpoints of ``jobs`` runs."""
        weights = [run.config.model.num_params() * _BYTES_PER_PARAMETER for run in runs]
        # Plus one: the oldest checkpoint is deleted after the new one has been verified.
        checkpoints = max(run.config.train.checkpoint_keep + 1 for run in runs)
        largest = sorted(weights)[-jobs:]
        checkpoint_bytes = _CHECKPOINT_COPIES * checkpoints * sum(largest)
        return sum(weights) + checkpoint_bytes + _MARGIN_BYTES * len(runs)

    def differences(self, run: RunDir) -> Sequence[str]:
        """Return the source files, torch version and device model changed since ``run``."""
        return changes_since(run, self._device)

    def prepare(self, run: Run[Config]) -> None:
        """Write resolved_config.yaml, the worker's input, and the environment snapshot."""
        write_resolved_config(RunDir(run.path), run.config, self.settings(run))
        if run.config.environment.snapshot:
            keep_snapshot(self.build_dir, RunDir(run.path))

    def settings(self, run: Run[Config]) -> Mapping[str, Setting]:
        """Return the source of each non-default setting of the run."""
        place = Place(ROOT, self.build_dir)
        return settings(place.config, run.config.values, run.label)

    def processes(self, run: Run[Config]) -> int:
        """Return the number of processes: ``GPUS``, also on a CPU."""
        return run.config.train.gpus

    def environment(self, run: Run[Config]) -> Mapping[str, str]:
        """Return the environment variables that the worker's libraries read at import."""
        return environment(run.config.machine)

    @cached_property
    def _device(self) -> str:
        if self._machine.device == "cpu":
            return cpu_model()
        return str(self._pool.call("gpt2.preflight:gpu_name"))
