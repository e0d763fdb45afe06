"""What holds for every score, shown on scores that magnitude never has."""

import pytest
import torch
from torch import nn

from lib.pruning.magnitude.options import MagnitudeOptions
from lib.pruning.mask import MaskPruner

OPTIONS = MagnitudeOptions(
    target=0.5,
    scope="global",
    ramp="linear",
    warmup=0.0,
    ramp_end=1.0,
    frequency=1,
    include_embeddings=False,
)


class _LargestFirst(MaskPruner):
    """Negative scores, and the highest for a weight that is pruned."""

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return -self._parameters[name].detach().abs()


class _AllEqual(MaskPruner):
    """Nothing to tell weights apart by."""

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return torch.full_like(self._parameters[name], -1.0)


@pytest.mark.parametrize("kind", [_LargestFirst, _AllEqual])
def test_pruned_weights_stay_pruned_and_the_target_is_met(kind: type[MaskPruner]) -> None:
    torch.manual_seed(11)
    weights = {"a": nn.Parameter(torch.randn(20, 30)), "b": nn.Parameter(torch.randn(50, 8))}
    optimizer = torch.optim.SGD(weights.values(), lr=0.0)
    pruner = kind(weights, OPTIONS)
    dead = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in weights.items()}
    for step in range(1, 11):
        pruner.after_step(step, step / 10, optimizer)
        assert pruner.sparsity() == pytest.approx(0.5 * step / 10, abs=0.0005)
        for name, mask in pruner.masks.items():
            assert not bool((dead[name] & mask).any())
            assert torch.equal(weights[name] == 0, ~mask)
            dead[name] = ~mask
