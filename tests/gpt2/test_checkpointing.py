"""Blocks that are computed again in the backward pass: the same bits, and less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.model import GPT
from tests.gpt2.builders import EVERYTHING, make_model_config

# What hands a state from block to block, draws dropout by other means, or saves tensors by itself.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"attention_backend": "rows"},
    "state between blocks": EVERYTHING,
    "joined": {"attention_backend": "joined", "terms": ("reciprocal",), "dropout": 0.0},
    "own": {"projection": "grouped", "pattern": "nsa"},
}


def gradients(config: Any, again: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Of every parameter after two accumulated losses, and where the generator stands then."""
    model = GPT(config)
    model.init_weights(1)
    model.grad_checkpointing = again
    idx_BT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    for _ in range(2):
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return found, torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_the_same_to_the_bit(name: str) -> None:
    config = make_model_config(**{"n_layer": 3, "dropout": 0.3, **MODELS[name]})
    kept, stands = gradients(config, again=False)
    computed_again, stands_again = gradients(config, again=True)
    different = [n for n in kept if not torch.equal(kept[n], computed_again[n])]
    assert different == [] and torch.equal(stands, stands_again)


def test_a_block_s_inside_is_not_kept() -> None:
    """Bytes that the graph holds between forward and backward, counted as they are saved."""
    model = GPT(make_model_config(n_layer=3, n_embd=64))
    idx_BT = torch.zeros(4, 16, dtype=torch.long)

    def saved(again: bool) -> int:
        model.grad_checkpointing = again
        sizes = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(idx_BT, idx_BT)
        return sum(sizes.values())

    assert saved(again=True) < saved(again=False) / 2


def test_the_configuration_decides() -> None:
    assert GPT(make_model_config(grad_checkpointing=True)).grad_checkpointing
    assert not GPT(make_model_config()).grad_checkpointing
