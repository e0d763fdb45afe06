"""Roles of a model's parameters, and optimizer parameter groups by role."""

from typing import TypedDict

from torch import nn


class ParameterGroup(TypedDict):
    """Parameter group of torch's optimizers, which store the names as ``param_names``."""

    params: list[tuple[str, nn.Parameter]]
    weight_decay: float


def embeddings(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable weights of ``nn.Embedding`` by name, also if tied to an output head."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name: p for name, p in _trainable(model).items() if id(p) in tables}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trainable parameters with two or more dimensions by name, without embeddings."""
    tables = embeddings(model)
    return {name: p for name, p in _trainable(model).items() if p.ndim >= 2 and name not in tables}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Return two groups: matrices with weight decay, and all other parameters without.

    Embeddings, biases, norms, gates and scalars do not decay. A tied matrix occurs once, under its
    first name. A group without parameters is omitted.
    """
    decayed = matrices(model)
    undecayed = {name: p for name, p in _trainable(model).items() if name not in decayed}
    groups: list[ParameterGroup] = [
        {"params": list(decayed.items()), "weight_decay": weight_decay},
        {"params": list(undecayed.items()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
