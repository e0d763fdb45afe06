"""A short run of the real trainer in its own directory, and the trace that several checks read."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpt2.check.context import CheckContext
from gpt2.config import Config
from gpt2.training import loop
from gpt2.training.loop import open_session, train_step
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.state import MicroBatch, StepMetrics, TrainState
from lib.optim.muon import Muon
from lib.optim.spam import Adamwspam
from lib.pruning.pruners import MaskPruner
from lib.runs.run_dir import RunDir

# Elements per chunk of optimizer and pruner, so that a matrix has several, as at full size.
_CHUNK = 1 << 14
# Steps after which every parameter must have received a gradient.
GRADIENT_STEPS = 3
CHECKPOINT_STEP = 3
# Steps of the last evaluation and the last statistics in the checkpoint.
RECORDED_STEPS = (2, 3)


def compute_in_chunks(state: TrainState, elements: int) -> None:
    """Let optimizer and pruner of a small form compute in chunks of so many elements."""
    for part in (state.optimizer, state.pruner):
        if isinstance(part, (Adamwspam, Muon, MaskPruner)):
            part.chunk_elements = elements


class _KeptSteps(MetricsLog):
    """The trainer's log, which keeps the metrics of each step and writes none."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def add(self, measured: StepMetrics, lr: float) -> None:
        """Keep the metrics of a step."""
        self.steps.append(measured)


class ShortRun:
    """An open training session; ``build_dir`` contains the data, ``folder`` the run."""

    def __init__(self, config: Config, build_dir: Path, folder: Path) -> None:
        self.session = open_session(config, build_dir, RecordWriter(RunDir(folder)))
        compute_in_chunks(self.session, _CHUNK)
        self._log = _KeptSteps()
        self._batches: Iterator[list[MicroBatch]] | None = None

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step so far, in nats."""
        return [step.loss.item() for step in self._log.steps]

    def gradient_sums(self) -> dict[str, float]:
        """Return the sum of each parameter's gradient norms, before clipping."""
        norms = torch.stack([step.gradient_norms for step in self._log.steps]).sum(0)
        names = [name for name, _ in self.session.model.named_parameters()]
        return dict(zip(names, norms.tolist(), strict=True))

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights."""
        return {name: weight.clone() for name, weight in self.session.weights().items()}

    def step(self, micro_batches: list[MicroBatch] | None = None) -> None:
        """Run the trainer's next step, on the run's own data unless ``micro_batches`` are given."""
        if micro_batches is None:
            # Start at the session's current iteration, which a resume may have changed.
            if self._batches is None:
                self._batches = self.session.batches()
            micro_batches = next(self._batches)
        train_step(self.session, micro_batches, self._log)


class TracedRun:
    """Training of the whole budget of ``config``, with a checkpoint two steps before the end."""

    def __init__(self, config: Config, context: CheckContext) -> None:
        self.config = config
        self.folder = context.new_run_dir()
        run = ShortRun(config, context.prepare_data(config), self.folder)
        self.session = session = run.session
        # State of the generator that dropout draws from, before the first step.
        self.dropout_start = torch.get_rng_state()
        self.initial_weights = run.weights()
        # Weights and gradients of the first steps.
        self.weights_after_gradient_steps: dict[str, Tensor] = {}
        self.gradient_sums: dict[str, float] = {}
        # Matrices in which a pruned weight was not pruned after a later step.
        self.revived: set[str] = set()
        alive: dict[str, Tensor] = {}
        for i in range(1, session.budget.iterations + 1):
            run.step()
            session.records.metrics(kind="check", iteration=i)
            if isinstance(session.pruner, MaskPruner):
                masks = session.pruner.masks
                self.revived |= {n for n in alive if bool((masks[n] & ~alive[n]).any())}
                alive = {name: mask.clone() for name, mask in masks.items()}
            if i == GRADIENT_STEPS:
                self.weights_after_gradient_steps = run.weights()
                self.gradient_sums = run.gradient_sums()
            if i == CHECKPOINT_STEP:
                session.evaluated_at, session.statistics_at = RECORDED_STEPS
                loop.save_checkpoint(session)
        self.losses = run.losses
        self.data_order = session.order.state_dict()
        self.final_weights = run.weights()
