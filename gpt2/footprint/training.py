"""A minimal training step: model, optimizer, pruner, and the trainer's own step function.

B micro-batch, T tokens.
"""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training.session import Session
from gpt2.training.step import optimizer_step
from lib.machine.group import Group
from lib.machine.setup import grad_scaler
from lib.optim import OPTIMIZERS
from lib.optim.groups import parameter_groups
from lib.pruning import PRUNERS
from lib.pruning.contract import Pruner


class Training:
    """Model, optimizer and pruner as built by the trainer, on the CPU, randomly initialized."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = GPT(config.model)
        groups = parameter_groups(self.model, config.optimizer.weight_decay)
        self.optimizer = OPTIMIZERS.module(config.optimizer.name)(
            groups, config.optimizer, config.schedule.learning_rate
        )
        self.pruner: Pruner = PRUNERS.module(config.pruning.name)(self.model, config.pruning)

    def step(self, tokens_BT: list[Tensor], pruner: Pruner | None = None) -> None:
        """Run one optimizer step, with one micro-batch for each of ``tokens_BT``.

        Each has T + 1 tokens per row.
        """
        session = SimpleNamespace(
            model=self.model,
            forward=self.model,
            config=self.config,
            device=torch.device("cpu"),
            group=Group(),
            optimizer=self.optimizer,
            scaler=grad_scaler(self.config.machine),
            pruner=pruner or self.pruner,
            iteration=0,
        )
        micro_batches = [(t[:, :-1], t[:, 1:]) for t in tokens_BT]
        optimizer_step(cast(Session, session), micro_batches, self.config.schedule.learning_rate)
