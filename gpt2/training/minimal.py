"""Optimizer steps on given tokens: as the trainer runs them, without data, records and log.

B micro-batch, T tokens.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training.records import NullRecords
from gpt2.training.session import TrainingSession
from gpt2.training.setup import build_state, place_model
from gpt2.training.step import optimizer_step
from lib.env.process_group import ProcessGroup
from lib.runs.run_dir import RunDir

_CPU = torch.device("cpu")


class MinimalTraining:
    """Model and state as built by the trainer, with random weights.

    The ranks of a ``group`` share the model as configured.
    """

    def __init__(
        self, config: Config, device: torch.device = _CPU, group: ProcessGroup | None = None
    ) -> None:
        self.config, self.device, self.group = config, device, group or ProcessGroup()
        model = GPT(config.model)
        self.forward, blank = place_model(config, model, self.group, device)
        self.state = build_state(config, model, time.perf_counter, self.group, device)
        self.state.blank = blank
        # The memory of a step is not tried before it.
        self.state.steps_to_probe = 0

    def step(self, tokens_BT: list[Tensor]) -> None:
        """Run one optimizer step, with one micro-batch for each of ``tokens_BT``.

        Each has T + 1 tokens per row.
        """
        session = SimpleNamespace(
            forward=self.forward,
            config=self.config,
            device=self.device,
            group=self.group,
            records=NullRecords(RunDir(Path())),
            state=self.state,
        )
        micro_batches = [(t[:, :-1], t[:, 1:]) for t in tokens_BT]
        optimizer_step(
            cast(TrainingSession, session), micro_batches, self.config.schedule.learning_rate
        )
