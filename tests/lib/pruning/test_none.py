"""Tests of the pruner that prunes nothing."""

import torch
from torch import nn

from lib.pruning.options import PRUNERS, NoneOptions
from lib.pruning.pruners import NonePruner


def test_changes_nothing() -> None:
    model = nn.Linear(3, 3)
    pruner = NonePruner()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.mask_gradients()
    pruner.after_step(1, 1.0, optimizer)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert pruner.sparsity() == 0.0
    assert pruner.sparsity_by_layer() == pruner.prunable_weights() == {}
    pruner.load_state_dict(pruner.state_dict())


def test_binds_from_the_choice_alone() -> None:
    assert PRUNERS.bind({"PRUNING": "none"}) == (NoneOptions(),)
