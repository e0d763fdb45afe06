"""Process-wide generators."""

import io
import random

import numpy as np
import torch

from lib.repro.rng import rng_state, seed_all, set_rng_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    """A number from each generator, the second normal one of a pair among them."""
    return [random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]


def test_the_seed_decides_every_generator() -> None:
    before = rng_state(CPU)
    seed_all(1)
    first = [draw(), draw()]
    seed_all(1)
    assert [draw(), draw()] == first
    seed_all(2)
    assert all(a != b for a, b in zip(draw(), first[0], strict=True))
    set_rng_state(before, CPU)


def test_the_state_goes_on_where_it_was_after_a_file() -> None:
    seed_all(3)
    draw()
    stream = io.BytesIO()
    torch.save(rng_state(CPU), stream)
    expected = [draw(), draw()]
    seed_all(4)
    stream.seek(0)
    set_rng_state(torch.load(stream, weights_only=True), CPU)
    assert [draw(), draw()] == expected
