"""One short training of a step, watched: what several checks read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt2 import train
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.workshop import Workshop
from gpt2.config import Config

# Every parameter has to have had a gradient by then.
WATCHED = 3
SAVED_AT = 3
# One vector and one matrix, which every step has.
FOLLOWED = ("ln_f.weight", "h.0.attn.c_proj.weight")


@dataclass(frozen=True)
class Update:
    """What an optimizer step was given: its learning rate, and the gradients it saw by name."""

    lr: float
    # Before clipping, and of what the optimizer saw.
    gradient_norm: Tensor
    clipped_norm: Tensor
    gradients: dict[str, Tensor]


class Trial:
    """Trains the whole budget of ``config`` and saves a checkpoint half way."""

    def __init__(self, config: Config, workshop: Workshop) -> None:
        self.config = config
        self.folder = workshop.new_folder()
        self.rehearsal = Rehearsal(config, workshop.prepared(config), self.folder)
        session = self.rehearsal.session
        self.start = {name: w.clone() for name, w in session.weights().items()}
        # Weights after the watched steps, and names of parameters in them.
        self.watched: dict[str, Tensor] = {}
        self.with_gradient: set[str] = set()
        self.not_finite: set[str] = set()
        # After each step.
        self.sparsity: list[float] = []
        self.updates: list[Update] = []
        hooks = [self._watch(name, p) for name, p in session.model.named_parameters()]
        session.optimizer.register_step_pre_hook(self._note_update)
        for i in range(1, session.budget.iterations + 1):
            self.rehearsal.step()
            self.sparsity.append(session.pruner.sparsity())
            if i == WATCHED:
                for hook in hooks:
                    hook.remove()
                self.watched = {name: w.clone() for name, w in session.weights().items()}
            if i == SAVED_AT:
                train.save(session)
        self.losses = list(self.rehearsal.losses)
        self.digest = self.rehearsal.digest()
        self.end = {name: w.clone() for name, w in session.weights().items()}

    def _watch(self, name: str, parameter: nn.Parameter) -> Any:
        """Note whether the parameter gets a gradient other than zero."""

        def note(gradient: Tensor) -> None:
            if not bool(torch.isfinite(gradient).all()):
                self.not_finite.add(name)
            elif bool(gradient.any()):
                self.with_gradient.add(name)

        return parameter.register_hook(note)

    def _note_update(self, optimizer: Any, arguments: tuple[Any, ...], named: Any) -> None:
        """What the optimizer is about to read; it may change it. A step inside a step says less."""
        if "gradient_norm" not in named:
            return
        parameters = dict(self.rehearsal.session.model.named_parameters())
        gradients = {
            name: parameters[name].grad.clone()
            for name in FOLLOWED
            if parameters[name].grad is not None
        }
        lr, norm = optimizer.param_groups[0]["lr"], named["gradient_norm"].clone()
        seen = [p.grad for p in parameters.values() if p.grad is not None]
        clipped = torch.nn.utils.get_total_norm(seen)
        self.updates.append(Update(lr, norm, clipped, gradients))
