"""One instrumented short training run of a step, shared by several checks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt2 import train
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.workshop import Workshop
from gpt2.config import Config
from lib.pruning.seen import Seen

# Steps after which every parameter must have received a gradient.
WATCHED = 3
SAVED_AT = 3
# One vector and one matrix that every model has.
FOLLOWED = ("ln_f.weight", "h.0.attn.c_proj.weight")
# Elements of each followed tensor: enough to identify an algorithm, few enough for scalar formulas.
_MAX_ELEMENTS = 128


@dataclass(frozen=True)
class Update:
    """Inputs of an optimizer step: learning rate, and gradients by name."""

    lr: float
    # Gradient norms before and after clipping.
    gradient_norm: Tensor
    clipped_norm: Tensor
    gradients: dict[str, Tensor]
    # Weights of the followed matrix before the step.
    weights: Tensor


class Trial:
    """Training of the whole budget of ``config``, with a checkpoint half way."""

    def __init__(self, config: Config, workshop: Workshop) -> None:
        self.config = config
        self.folder = workshop.new_folder()
        self.rehearsal = Rehearsal(config, workshop.prepared(config), self.folder)
        session = self.rehearsal.session
        self.start = {name: w.clone() for name, w in session.weights().items()}
        # Weights after the watched steps, and names of parameters with gradients in these steps.
        self.watched: dict[str, Tensor] = {}
        self.with_gradient: set[str] = set()
        self.not_finite: set[str] = set()
        # Types of the outputs of the followed matrix.
        self.product_dtypes: set[torch.dtype] = set()
        # Sparsity after each step.
        self.sparsity: list[float] = []
        self.updates: list[Update] = []
        # Inputs of the pruner for the matrix after each step, and the mask of remaining weights.
        self.seen: list[Seen] = []
        self.left: list[list[bool]] = []
        hooks = [self._watch(name, p) for name, p in session.model.named_parameters()]
        product = session.model.get_submodule(FOLLOWED[1].removesuffix(".weight"))
        hooks.append(product.register_forward_hook(self._record_product))
        session.optimizer.register_step_pre_hook(self._record_update)
        if config.pruning.name != "none":
            session.optimizer.register_step_post_hook(self._record_pruner_inputs)
        for i in range(1, session.budget.iterations + 1):
            self.rehearsal.step()
            self.sparsity.append(session.pruner.sparsity())
            self.left.append([w != 0.0 for w in first_numbers(self._matrix)])
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
        """Record whether the parameter gets a nonzero gradient."""

        def record(gradient: Tensor) -> None:
            if not bool(torch.isfinite(gradient).all()):
                self.not_finite.add(name)
            elif bool(gradient.any()):
                self.with_gradient.add(name)

        return parameter.register_hook(record)

    def _record_product(
        self, module: nn.Module, inputs: tuple[Tensor, ...], product: Tensor
    ) -> None:
        self.product_dtypes.add(product.dtype)

    def _record_update(self, optimizer: Any, arguments: tuple[Any, ...], named: Any) -> None:
        """Record the inputs of an optimizer step, which may modify them.

        A step nested in another step passes no gradient norm and is skipped.
        """
        if "gradient_norm" not in named:
            return
        parameters = dict(self.rehearsal.session.model.named_parameters())
        gradients = {
            name: parameters[name].grad.clone()
            for name in FOLLOWED
            if parameters[name].grad is not None
        }
        lr, norm = optimizer.param_groups[0]["lr"], named["gradient_norm"].clone()
        all_gradients = [p.grad for p in parameters.values() if p.grad is not None]
        clipped = torch.nn.utils.get_total_norm(all_gradients)
        weights = parameters[FOLLOWED[1]].detach().clone()
        self.updates.append(Update(lr, norm, clipped, gradients, weights))

    @property
    def _matrix(self) -> Tensor:
        return self.rehearsal.session.weights()[FOLLOWED[1]]

    def _record_pruner_inputs(self, optimizer: Any, arguments: tuple[Any, ...], named: Any) -> None:
        """Record the pruner's inputs, before its weights are set to zero."""
        if "gradient_norm" not in named:
            return
        parameter = dict(self.rehearsal.session.model.named_parameters())[FOLLOWED[1]]
        state = optimizer.state[parameter]
        moments = [
            first_numbers(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state
        ]
        m, v = moments or ([], [])
        history = [
            (
                first_numbers(update.gradients[FOLLOWED[1]] * _unclipped(update)),
                first_numbers(update.weights),
            )
            for update in self.updates
            if FOLLOWED[1] in update.gradients
        ]
        correction = 1.0
        if moments:
            correction -= optimizer.param_groups[0]["betas"][0] ** state["step"].item()
        self.seen.append(Seen(first_numbers(parameter), history, m, v, correction))


def first_numbers(tensor: Tensor) -> list[float]:
    """Return the elements of a followed tensor that are recomputed."""
    numbers: list[float] = tensor.flatten()[:_MAX_ELEMENTS].tolist()
    return numbers


def _unclipped(update: Update) -> Tensor:
    return update.gradient_norm / update.clipped_norm
