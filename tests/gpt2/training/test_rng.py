"""Seeding, saving and restoring of process-wide random generators."""

import io
import random

import numpy as np
import torch

from gpt2.training.rng import rng_state, seed_all, set_rng_state
from lib.runs.checkpoint import state_digest


def draw():
    """Return one value per generator, including the second value of a normal pair."""
    return [random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]


def test_seed_and_saved_state_decide_every_generator():
    cpu, stream = torch.device("cpu"), io.BytesIO()
    seed_all(1)
    first = draw()
    torch.save(rng_state(cpu), stream)
    second = draw()
    seed_all(1)
    assert draw() == first
    seed_all(2)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    stream.seek(0)
    set_rng_state(torch.load(stream, weights_only=True), cpu)
    assert draw() == second


def test_a_state_digest_sees_every_bit_and_type():
    one = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {1: True}}
    digest = state_digest(one)
    assert state_digest({"b": {1: True}, "a": (torch.tensor([1.0, 2.0]), 3)}) == digest
    others = [
        one | {"a": [torch.tensor([1.0, 2.0000003]), 3]},
        one | {"a": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3]},
        one | {"a": [torch.tensor([[1.0], [2.0]]), 3]},
        one | {"a": [torch.tensor([1.0, 2.0]), 3.0]},
        one | {"b": {1: 1}},
        one | {"b": {"1": True}},
        one | {"c": None},
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor(1.5),
        torch.tensor([1.5]),
    ]
    assert len({digest, *map(state_digest, others)}) == 1 + len(others)
