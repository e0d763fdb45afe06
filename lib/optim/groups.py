"""The roles of a model's parameters, and the optimizer's groups by role."""

from typing import TypedDict

from torch import nn


class ParameterGroup(TypedDict):
    """A group for torch's optimizers, which keep the names as ``param_names``."""

    params: list[tuple[str, nn.Parameter]]
    weight_decay: float


def embeddings(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable weights of ``nn.Embedding``, also where an output head shares them."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name: p for name, p in _trainable(model).items() if id(p) in tables}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of two or more dimensions that are no embedding."""
    tables = embeddings(model)
    return {name: p for name, p in _trainable(model).items() if p.ndim >= 2 and name not in tables}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Two groups: matrices, which decay, and all else (embeddings, biases, norms, gates, scalars).

    A tied matrix is one parameter, under its first name. A group without parameters is left out.
    """
    decayed = matrices(model)
    kept = {name: p for name, p in _trainable(model).items() if name not in decayed}
    groups: list[ParameterGroup] = [
        {"params": list(decayed.items()), "weight_decay": weight_decay},
        {"params": list(kept.items()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
