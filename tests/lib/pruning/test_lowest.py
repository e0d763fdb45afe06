"""Tests of exact bottom-k selection against a stable sort."""

import pytest
import torch

from lib.pruning.pruners import bottom_k

TENSORS = {
    "normal": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
    "tiny": torch.randn(500, generator=torch.Generator().manual_seed(2)) * 1e-30,
    "equal": torch.full((7, 11), 0.25),
    "zeros": torch.zeros(300),
    "steps": torch.randint(-3, 4, (9, 20), generator=torch.Generator().manual_seed(3)).float(),
    "infinite": torch.tensor([-torch.inf, torch.inf, -torch.inf, 1.0]),
}
TOTAL = sum(t.numel() for t in TENSORS.values())


@pytest.mark.parametrize("count", [1, 2, 3, 250, 700, 900, 1100, 1500, TOTAL - 1, TOTAL])
def test_equals_a_stable_sort(count: int) -> None:
    joined = torch.cat([t.flatten() for t in TENSORS.values()])
    expected = torch.zeros(TOTAL, dtype=torch.bool)
    expected[torch.sort(joined, stable=True).indices[:count]] = True
    found = dict(bottom_k(TENSORS, count))
    assert all(found[name].shape == TENSORS[name].shape for name in TENSORS)
    assert torch.equal(torch.cat([found[name].flatten() for name in TENSORS]), expected)


def test_all_equal_takes_exactly_as_many_as_asked() -> None:
    zeros = {"a": torch.zeros(10), "b": torch.zeros(4, 5)}
    found = dict(bottom_k(zeros, 13))
    assert found["a"].tolist() == [True] * 10
    assert found["b"].flatten().tolist() == [True] * 3 + [False] * 17
