"""Batches are the same with and without worker processes, on one rank or on several."""

import itertools
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.data.dataset import open_dataset
from gpt2.data.loader import BatchLoader
from gpt2.data.prepare import prepare_dataset
from gpt2.data.sampler import TrainSampler


@pytest.fixture
def sampler(config, texts, tmp_path):
    """Windows of 16 + 1 tokens of the small data set."""
    prepare_dataset(config(), tmp_path)
    return TrainSampler(open_dataset(config(), tmp_path).train, 16, seed=3)


@pytest.fixture
def loader(config, sampler):
    """A loader with a global batch of 12."""

    def build(micro=12, rank=0, ranks=1, step=0, told=None, **changes):
        def consumed(offsets_B):
            if told is not None:
                told.append(offsets_B.tolist())

        settings = config(**changes)
        return BatchLoader(sampler, settings, 12, micro, rank, ranks, step, False, consumed)

    return build


def inputs(loader, steps):
    """x of the first steps [steps, sequences, T], with y checked against it."""
    found = []
    for step in itertools.islice(loader, steps):
        for x_BT, y_BT in step:
            assert x_BT.dtype == y_BT.dtype == torch.int64
            assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
        found.append(torch.cat([x_BT for x_BT, _ in step]).numpy())
    return np.stack(found)


def soon(condition):
    """Return whether the condition becomes true within five seconds."""
    end = time.monotonic() + 5
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(met)


def children_are_gone():
    return soon(lambda: not multiprocessing.active_children())


def test_steps_contain_the_samplers_sequences(loader, sampler):
    expected = sampler.sequences(0, 60).reshape(5, 12, 17)[:, :, :-1]
    assert np.array_equal(inputs(loader(), 5), expected)
    assert np.array_equal(inputs(loader(micro=3), 5), expected)
    assert np.array_equal(inputs(loader(step=2), 3), expected[2:])
    parts = [inputs(loader(micro=2, rank=r, ranks=3), 5) for r in range(3)]
    assert np.array_equal(np.concatenate(parts, axis=1), expected)


def test_workers_change_nothing_and_end_with_the_iterator(loader):
    expected = inputs(loader(micro=3), 4)
    state = torch.get_rng_state()
    assert np.array_equal(inputs(loader(micro=3, loader_workers=2), 4), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert children_are_gone()
    stream = iter(loader(loader_workers=2))
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert children_are_gone()


@pytest.mark.parametrize("workers", [0, 2])
def test_yielded_steps_are_reported(workers, loader, sampler):
    told = []
    many = loader(micro=3, ranks=2, rank=1, step=4, loader_workers=workers, told=told)
    stream = iter(many)
    assert [next(stream) for _ in range(3)] and len(told) == 3
    # The second half of steps 4, 5 and 6, independent of prefetched batches.
    assert told == [sampler.offsets(12 * step + 6, 6) for step in (4, 5, 6)]
    stream.close()


def test_a_blocked_process_ends_with_its_run(loader, monkeypatch, tmp_path):
    def blocked(sampler, offsets):
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr(TrainSampler, "windows", blocked)
    context = multiprocessing.get_context("fork")
    run = context.Process(target=lambda: next(iter(loader(loader_workers=1))))
    run.start()
    assert soon(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    run.kill()
    run.join()
    worker = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    # A zombie has no command line.
    assert soon(lambda: not worker.exists() or not worker.read_bytes())
