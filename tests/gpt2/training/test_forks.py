"""Runs that continue from a checkpoint that a finished run kept."""

import shutil

import pytest
import torch

from gpt2.running.prolong import plan_prolonged
from lib.errors import ConfigError, RunError
from lib.runs.checkpoint import read_checkpoint
from lib.runs.run_dir import RunDir, State
from tests.gpt2.training.conftest import ITERATIONS

KEPT = {"CHECKPOINT_KEEP_FINISHED": True, "CHECKPOINT_KEEP": 5, "SAMPLE_TOKENS": 0}


@pytest.fixture(scope="module")
def parent(configure, lasting):
    """A finished run with its checkpoints."""
    return lasting()(configure(**KEPT), "parent").files


@pytest.fixture
def forked(session):
    """Return a function that opens a session from a checkpoint of a run."""
    return lambda run, **changes: session(INIT_FROM=f"run:{run.path.absolute()}@4", **changes)


def moments(state):
    """Return the moments of each parameter by its name, from a state of an optimizer."""
    return {
        name: state["state"][index]
        for group in state["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        if index in state["state"]
    }


def test_weights_and_moments_are_those_of_the_checkpoint(parent, forked):
    kept = read_checkpoint(parent.checkpoint(4))
    state = forked(parent, LEARNING_RATE="5e-3")
    torch.testing.assert_close(state.weights(), kept.weights, rtol=0, atol=0)
    saved = moments(kept.state["session"]["optimizer"])
    assert saved
    torch.testing.assert_close(moments(state.optimizer.state_dict()), saved, rtol=0, atol=0)
    # It is a new run with its own options, schedule and order of the data.
    assert state.iteration == 0 and state.progress == 0
    assert {group["lr"] for group in state.optimizer.param_groups} == {5e-3}


def test_another_optimizer_and_new_parameters_have_no_moments(parent, forked):
    other = forked(parent, OPTIMIZER_ADAMWSPAM=None, OPTIMIZER_SGD=True)
    assert moments(other.optimizer.state_dict()) == {}
    gated = forked(parent, MLP_ATTN_GATE=True)
    ours = moments(gated.optimizer.state_dict())
    assert gated.weights().keys() - ours.keys() and len(ours) > 5


def test_an_iteration_without_checkpoint_names_those_there_are(parent, trained, build_dir):
    assert {4, 8, ITERATIONS} <= set(parent.checkpoint_steps)
    assert not trained.files.checkpoints.exists()
    kept = ", ".join(map(str, parent.checkpoint_steps))
    for run, words in ((parent, kept), (trained.files, "kept none")):
        with pytest.raises(ConfigError, match=words) as caught:
            plan_prolonged(str(run.path), build_dir, 5, [], at=5)
        assert [(p.code, p.where) for p in caught.value.problems] == [("run.no-checkpoint", "FROM")]


def test_a_damaged_checkpoint_is_refused(parent, forked, tmp_path):
    damaged = RunDir(shutil.copytree(parent.path, tmp_path / "damaged"))
    with open(damaged.checkpoint(4) / "state.pt", "r+b") as file:
        file.write(b"other")
    with pytest.raises(RunError) as caught:
        forked(damaged)
    assert caught.value.codes == ["checkpoint.damaged"]


@pytest.mark.slow
def test_an_interrupted_fork_ends_with_the_bytes_of_an_uninterrupted_one(parent, train, configure):
    config = configure(INIT_FROM=f"run:{parent.path.absolute()}@4", MAX_ITERS=4)
    whole = train(config, "whole").core()
    assert train(config, "stopped", stop_at=3).status.state is State.INTERRUPTED
    assert train(config, "stopped").core() == whole
    # The moments count: without them, the losses are others.
    anew = configure(INIT_FROM=f"run:{parent.path.absolute()}", MAX_ITERS=4)
    assert train(anew, "anew").core()["metrics.jsonl"] != whole["metrics.jsonl"]
