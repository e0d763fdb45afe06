"""Tests of the selection of prunable matrices."""

import torch

from lib.pruning.pruners import NeverPruned, prunable_parameters


def test_an_unprunable_module_keeps_its_matrices() -> None:
    class Gate(NeverPruned):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

    model = torch.nn.ModuleDict({"gate": Gate(), "other": torch.nn.Linear(4, 4)})
    assert set(prunable_parameters(model, False)) == {"other.weight"}
    # A matrix shared with such a module is excluded too, whatever its first name.
    tied = torch.nn.ModuleList([model["gate"].inner[0], model["gate"]])
    assert prunable_parameters(tied, True) == {}
