"""Parameter groups, and the optimizers on torch's own kernels."""

from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import torch
from torch import nn

from lib.optim.options import AdamFamilyOptions, SgdOptions
from lib.pruning.layers import PaddedHead, StackedLinear


class ParameterGroup(TypedDict):
    """Parameter group of torch's optimizers, which store the names as ``param_names``."""

    params: list[tuple[str, nn.Parameter]]
    weight_decay: float
    # Rows of the matrices that each parameter stacks, if they are updated as matrices.
    rows: NotRequired[tuple[int, ...]]


def embedding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable weights of embedding tables and of an output head, tied or not, by name."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | PaddedHead)}
    return {name: p for name, p in trainable_parameters(model).items() if id(p) in tables}


def matrix_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trainable parameters with two or more dimensions by name, without tables and head."""
    tables = embedding_parameters(model)
    return {
        name: p
        for name, p in trainable_parameters(model).items()
        if p.ndim >= 2 and name not in tables
    }


def parameter_groups(
    model: nn.Module, weight_decay: float, whole_matrices: bool = False
) -> list[ParameterGroup]:
    """Return two groups: matrices with weight decay, and all other parameters without.

    A gate's matrices decay like all others. Embeddings, the head, biases, norms and scalars do not
    decay. A tied matrix occurs once, under its first name. A group without parameters is omitted.

    ``whole_matrices`` moves hidden matrices to groups of their own before these, one for each shape.
    """
    decayed = matrix_parameters(model)
    undecayed = {name: p for name, p in trainable_parameters(model).items() if name not in decayed}
    by_shape: dict[Any, ParameterGroup] = {}
    for name, rows in (_hidden_rows(model) if whole_matrices else {}).items():
        parameter = decayed.pop(name)
        group = by_shape.setdefault(
            (parameter.shape, rows), {"params": [], "weight_decay": weight_decay, "rows": rows}
        )
        group["params"].append((name, parameter))
    groups: list[ParameterGroup] = [
        *by_shape.values(),
        {"params": list(decayed.items()), "weight_decay": weight_decay},
        {"params": list(undecayed.items()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _hidden_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the rows of the matrices that each hidden matrix stacks, by its name."""
    stacked = {id(m.weight): m.rows for m in model.modules() if isinstance(m, StackedLinear)}
    return {n: stacked.get(id(p), (p.shape[-2],)) for n, p in matrix_parameters(model).items()}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class _Plain(torch.optim.Optimizer):
    """torch's interface with two additions, as of every optimizer here.

    ``gradient_norm`` is the global norm before clipping; without it, an optimizer that needs the norm
    computes it. ``statistics`` returns metrics of a log line, and may wait for the device.
    """

    def step(  # type: ignore[override]  # torch declares overloads by the type of closure
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: torch.Tensor | None = None,
    ) -> float | None:
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        return {}


class Adam(_Plain, torch.optim.Adam):
    """torch's Adam, configured as Adam, AdamW or AMSGrad by its options.

    ``fused`` makes one pass over memory on CPUs and GPUs (on a CPU five times as fast as the plain
    loop, and elementwise, so deterministic). torch raises RuntimeError if a device has no fused
    kernel.
    """

    def __init__(self, groups: list[ParameterGroup], options: AdamFamilyOptions, lr: float) -> None:
        super().__init__(
            [dict(group) for group in groups],
            lr=lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            amsgrad=options.amsgrad,
            fused=True,
            decoupled_weight_decay=options.decoupled,
        )


class Sgd(_Plain, torch.optim.SGD):
    """torch's SGD with the configured options.

    Not fused: torch's fused kernel leaves the momentum uninitialized if a GradScaler skips the
    first step, and fails if a parameter gets its first gradient later than the others of its group.
    """

    def __init__(self, groups: list[ParameterGroup], options: SgdOptions, lr: float) -> None:
        super().__init__(
            [dict(group) for group in groups],
            lr=lr,
            momentum=options.momentum,
            dampening=options.dampening,
            nesterov=options.nesterov,
            foreach=True,
        )


# Adam stands for its subclasses too.
Optimizer = Adam | Sgd
