"""Tests of the parameter groups with and without weight decay."""

import torch
from torch import nn

from lib.optim.optimizers import embedding_parameters, matrix_parameters, parameter_groups


class _Tiny(nn.Module):
    """Model with one parameter of each role, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        # Defined before the embedding, so that the tied matrix has the head's name first.
        self.head = nn.Linear(4, 10, bias=False)
        self.wte = nn.Embedding(10, 4)
        self.head.weight = self.wte.weight
        self.wpe = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4)
        self.per_head = nn.Parameter(torch.zeros(2, 3, 4))
        self.gate = nn.Parameter(torch.zeros(2))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_matrices_decay_and_nothing_else() -> None:
    decayed, kept = parameter_groups(_Tiny(), 0.1)
    assert [name for name, _ in decayed["params"]] == ["per_head", "proj.weight"]
    assert decayed["weight_decay"] == 0.1
    assert {name for name, _ in kept["params"]} == {
        "gate",
        "alpha",
        "head.weight",
        "wpe.weight",
        "norm.weight",
        "norm.bias",
        "proj.bias",
    }
    assert kept["weight_decay"] == 0.0


def test_every_trainable_parameter_is_in_one_group_once() -> None:
    model = _Tiny()
    grouped = [id(p) for group in parameter_groups(model, 0.1) for _, p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trainable)


def test_a_tied_matrix_is_an_embedding() -> None:
    assert set(embedding_parameters(_Tiny())) == {"head.weight", "wpe.weight"}
    assert "head.weight" not in matrix_parameters(_Tiny())


def test_an_empty_group_is_left_out() -> None:
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1
