"""Seeding, saving and restoring of process-wide random generators."""

import io
import random
from typing import Any

import numpy as np
import torch

from gpt2.training.rng import rng_state, seed_all, set_rng_state
from lib.runs.checkpoint import state_digest

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Return one value per generator, including the second value of a normal pair."""
    return [random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]


def test_the_seed_decides_every_generator():
    before = rng_state(CPU)
    seed_all(1)
    first = [draw(), draw()]
    seed_all(1)
    assert [draw(), draw()] == first
    seed_all(2)
    assert all(a != b for a, b in zip(draw(), first[0], strict=True))
    set_rng_state(before, CPU)


def test_the_state_goes_on_where_it_was_after_a_file():
    seed_all(3)
    draw()
    stream = io.BytesIO()
    torch.save(rng_state(CPU), stream)
    expected = [draw(), draw()]
    seed_all(4)
    stream.seek(0)
    set_rng_state(torch.load(stream, weights_only=True), CPU)
    assert [draw(), draw()] == expected


def test_a_state_digest_sees_every_bit_and_type():
    one = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {1: True}}
    digest = state_digest(one)
    assert state_digest({"b": {1: True}, "a": (torch.tensor([1.0, 2.0]), 3)}) == digest
    others: list[Any] = [
        one | {"a": [torch.tensor([1.0, 2.0000003]), 3]},
        one | {"a": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3]},
        one | {"a": [torch.tensor([[1.0], [2.0]]), 3]},
        one | {"a": [torch.tensor([1.0, 2.0]), 3.0]},
        one | {"b": {1: 1}},
        one | {"b": {"1": True}},
        one | {"c": None},
    ]
    digests = {state_digest(other) for other in others}
    assert len(digests) == len(others) and digest not in digests
    zeros = torch.zeros(2)
    assert state_digest(zeros) != state_digest(zeros.int())
    assert state_digest(torch.tensor(1.5)) != state_digest(torch.tensor([1.5]))
