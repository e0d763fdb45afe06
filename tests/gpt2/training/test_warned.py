"""A run with DETERMINISTIC_WARN lists its non-deterministic operations."""

from unittest import mock

import pytest
import torch

from gpt2.training.state import TrainState
from lib.env.ranks import current_process

WARN = {"DETERMINISTIC_WARN": True, "EVAL_INTERVAL": 0, "MAX_ITERS": 4}


@pytest.fixture
def scattering():
    """Return a patch that adds a non-deterministic operation to every pass of the last rank."""
    passes = TrainState.backward

    def scattered(*arguments, **named):
        if current_process().rank == current_process().world_size - 1:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        return passes(*arguments, **named)

    return mock.patch.object(TrainState, "backward", scattered)


def test_a_warning_is_logged_once_and_survives_an_interruption(configure, train, scattering):
    config = configure(**WARN)
    with scattering:
        lines = train(config, stop_at=2).lines()
    assert [line.startswith("WARN ") for line in lines.splitlines() if "put_" in line] == [True]
    # The resumed run has no such operation.
    manifest = train(config).manifest()
    assert manifest["nondeterministic_ops_warned"] == ["put_"]
    states = {"requested": "warn", "resolved": "warn_only", "observed": "warn_only"}
    assert manifest["knobs"]["deterministic_algorithms"] == states
    assert manifest["deviations"] == []


@pytest.mark.slow
def test_a_warning_of_any_rank_is_recorded(configure, together, scattering):
    with scattering:
        found, ended = together(configure(GPUS=2, BATCH_SIZE=1, **WARN))
    assert ended == [["SUCCESS", 4, ""]] * 2
    assert found.manifest()["nondeterministic_ops_warned"] == ["put_"]


def test_no_warnings_and_disabled_warnings_are_distinguished(configure, train):
    for name, found in (("WARN", []), ("STRICT", None)):
        changes = {**WARN, "DETERMINISTIC_WARN": None, f"DETERMINISTIC_{name}": True}
        manifest = train(configure(**changes), name).manifest()
        assert manifest["nondeterministic_ops_warned"] == found
    # The same kernels give the same bits.
    assert train.found("WARN").core() == train.found("STRICT").core()
