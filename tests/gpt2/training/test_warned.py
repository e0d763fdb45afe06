"""A run with DETERMINISTIC_WARN lists its non-deterministic operations."""

from typing import Any

import pytest
import torch

from gpt2.training.state import TrainState
from lib.env.ranks import current_process

WARN = {"DETERMINISTIC_WARN": True, "EVAL_INTERVAL": 0, "MAX_ITERS": 4}


@pytest.fixture
def scattering(monkeypatch) -> None:
    """Add a non-deterministic operation to every pass of the last rank."""
    passes = TrainState.backward

    def scattered(*arguments: Any, **named: Any) -> torch.Tensor:
        if current_process().rank == current_process().world_size - 1:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        return passes(*arguments, **named)

    monkeypatch.setattr(TrainState, "backward", scattered)


@pytest.mark.usefixtures("scattering")
def test_a_warning_is_logged_once_and_survives_an_interruption(configure, train, monkeypatch):
    config = configure(**WARN)
    lines = train(config, stop_at=2).lines()
    assert [line.startswith("WARN ") for line in lines.splitlines() if "put_" in line] == [True]
    # The resumed run has no such operation.
    monkeypatch.undo()
    manifest = train(config).manifest()
    assert manifest["nondeterministic_ops_warned"] == ["put_"]
    states = {"requested": "warn", "resolved": "warn_only", "observed": "warn_only"}
    assert manifest["knobs"]["deterministic_algorithms"] == states
    assert manifest["deviations"] == []


@pytest.mark.usefixtures("scattering")
def test_a_warning_of_any_rank_is_recorded(configure, train, ranks):
    config = configure(GPUS=2, BATCH_SIZE=1, **WARN)
    assert ranks(2, lambda rank: train(config).status.state) == ["SUCCESS"] * 2
    assert train.found("run").manifest()["nondeterministic_ops_warned"] == ["put_"]


def test_no_warnings_and_disabled_warnings_are_distinguished(configure, train):
    for name, how, found in (("warn", "WARN", []), ("strict", "STRICT", None)):
        config = configure(**{**WARN, "DETERMINISTIC_WARN": None, f"DETERMINISTIC_{how}": True})
        assert train(config, name).manifest()["nondeterministic_ops_warned"] == found
    # The same kernels give the same bits.
    assert train.found("warn").core() == train.found("strict").core()
