"""Gradient checkpointing: bit-identical gradients with less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.model import GPT
from tests.gpt2.builders import EVERYTHING, make_model_config

# Models that pass state between blocks, have custom dropout, or save tensors in custom autograd.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"attention_backend": "rows"},
    "state between blocks": EVERYTHING,
    "values of the first block": {"value_mixes": ("value_residual",)},
    "own": {"projection": "grouped", "pattern": "nsa"},
}


def gradients(config: Any, recompute: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients after two accumulated losses, and the final RNG state."""
    model = GPT(config)
    model.init_weights(1)
    model.grad_checkpointing = recompute
    idx_BT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    for _ in range(2):
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(model.named_parameters()).keys()
    return grads, torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_identical(name):
    config = make_model_config(**{"n_layer": 3, "dropout": 0.3, **MODELS[name]})
    stored, rng_state = gradients(config, recompute=False)
    recomputed, rng_state_after = gradients(config, recompute=True)
    different = [n for n in stored if not torch.equal(stored[n], recomputed[n])]
    assert different == [] and torch.equal(rng_state, rng_state_after)


def test_activations_inside_a_block_are_not_saved():
    """Count the bytes that autograd saves between forward and backward."""
    idx_BT = torch.zeros(4, 16, dtype=torch.long)

    def saved(recompute: bool) -> int:
        model = GPT(make_model_config(n_layer=3, n_embd=64, grad_checkpointing=recompute))
        sizes = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(idx_BT, idx_BT)
        return sum(sizes.values())

    assert saved(recompute=True) < saved(recompute=False) / 2
