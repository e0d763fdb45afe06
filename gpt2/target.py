"""What the runner has to know to train this tree's runs."""

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

# What a worker would otherwise load for itself: optimizers import torch._dynamo at their first use.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "gpt2.train",
    "gpt2.preflight",
)
# fp32 weights, and as much again for each of Adam's two moments.
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
# Records, tables and the system's own overhead, for each run.
_MARGIN_BYTES = 1 << 20


class Gpt2Target:
    """``lib.runner.target.Target`` for this tree's trainer."""

    function = "gpt2.train:run"

    def __init__(
        self, plan: Plan, pool: Pool, *, allow_stale: bool = False, dirty: bool = False
    ) -> None:
        self.build_dir: Path = plan.build_dir
        # Resume checkpoints of other code, as the user asked.
        self.arguments: Mapping[str, Any] = {"allow_stale": allow_stale}
        self._place = TrainingPlace(plan.build_dir, plan.folder, dirty)
        self._machine = plan.base.machine
        self._pool = pool

    def preflight(self, pool: Pool, runs: Sequence[Run[Config]]) -> Sequence[Slot]:
        """The machine, checked in a worker, and only then the data: a machine that cannot train
        is not made to download first."""
        configs = [run.config for run in runs]
        slots: Sequence[Slot] = pool.call("gpt2.preflight:check_machine", configs, self._place)
        check_weights(configs, self.build_dir)
        check_data(configs, self.build_dir)
        return slots

    def bytes_needed(self, runs: Sequence[Run[Config]], jobs: int) -> int:
        """Final weights of all runs, and the checkpoints of those that train at a time."""
        weights = [run.config.model.num_params() * _BYTES_PER_PARAMETER for run in runs]
        # One more than is kept: the old one is deleted after the new one was verified.
        kept = max(run.config.train.checkpoint_keep + 1 for run in runs)
        largest = sorted(weights)[-jobs:]
        return sum(weights) + _CHECKPOINT_COPIES * kept * sum(largest) + _MARGIN_BYTES * len(runs)

    def differences(self, run: RunDir) -> Sequence[str]:
        """Source files, torch version and device model that have changed."""
        return changes_since(run, self._device)

    def prepare(self, run: Run[Config]) -> None:
        """Write resolved_config.yaml, from which the worker trains, and what it trains in."""
        write_resolved_config(RunDir(run.path), run.config, self.settings(run))
        if run.config.environment.snapshot:
            keep_snapshot(self.build_dir, RunDir(run.path))

    def settings(self, run: Run[Config]) -> Mapping[str, Setting]:
        """Who set what is no default in the run's configuration."""
        place = Place(ROOT, self.build_dir)
        return settings(place.config, run.config.values, run.label)

    def processes(self, run: Run[Config]) -> int:
        """``GPUS``, on a CPU too."""
        return run.config.train.gpus

    def environment(self, run: Run[Config]) -> Mapping[str, str]:
        """What libraries of the run's worker read at their start."""
        return environment(run.config.machine)

    @cached_property
    def _device(self) -> str:
        if self._machine.device == "cpu":
            return cpu_model()
        return str(self._pool.call("gpt2.preflight:gpu_name"))
