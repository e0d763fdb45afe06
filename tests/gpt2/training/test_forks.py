"""Runs that continue from a checkpoint that a finished run kept."""

import pytest
import torch

from gpt2.running.prolong import plan_prolonged
from lib.errors import ConfigError, RunError
from lib.runs.checkpoint import read_checkpoint
from lib.runs.run_dir import RunDir, State
from tests.gpt2.training.conftest import ITERATIONS

KEPT = {"CHECKPOINT_KEEP_FINISHED": True, "CHECKPOINT_KEEP": 5, "SAMPLE_TOKENS": 0}


@pytest.fixture
def parent(train, configure):
    """Return a finished run with its checkpoints."""
    return train(configure(**KEPT), "parent").files


def forked(session, run: RunDir, iteration: int, **changes):
    return session(INIT_FROM=f"run:{run.path.absolute()}@{iteration}", **changes)


def moments(optimizer) -> dict[str, dict]:
    """Return the state of each parameter by its name."""
    state = optimizer.state_dict() if hasattr(optimizer, "state_dict") else optimizer
    return {
        name: state["state"][index]
        for group in state["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        if index in state["state"]
    }


def test_a_finished_run_keeps_its_checkpoints_if_configured(parent, train, configure):
    assert {4, 8, ITERATIONS} <= set(parent.checkpoint_steps)
    assert not train(configure(SAMPLE_TOKENS=0), "other").files.checkpoints.exists()


def test_weights_and_moments_are_those_of_the_checkpoint(parent, session):
    kept = read_checkpoint(parent.checkpoint(4))
    state = forked(session, parent, 4, LEARNING_RATE="5e-3")
    for name, tensor in state.weights().items():
        assert torch.equal(tensor, kept.weights[name]), name
    saved = moments(kept.state["session"]["optimizer"])
    ours = moments(state.optimizer)
    assert ours.keys() == saved.keys() and saved
    for name, values in saved.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(ours[name][key]), torch.as_tensor(value)), (
                name,
                key,
            )
    # It is a new run with its own options, schedule and order of the data.
    assert state.iteration == 0 and state.progress == 0
    assert {group["lr"] for group in state.optimizer.param_groups} == {5e-3}


def test_another_optimizer_starts_anew(parent, session):
    opened = forked(session, parent, 4, OPTIMIZER_ADAMWSPAM=None, OPTIMIZER_SGD=True)
    assert moments(opened.optimizer) == {}


def test_new_parameters_have_no_moments(parent, session):
    state = forked(session, parent, 4, MLP_ATTN_GATE=True)
    names = set(dict(state.model.named_parameters()))
    ours = moments(state.optimizer)
    assert names - ours.keys() and len(ours) > 5


def test_an_iteration_without_checkpoint_names_those_there_are(parent, train, configure, build_dir):
    kept = ", ".join(map(str, parent.checkpoint_steps))
    for run, words in ((parent, kept), (train(configure(), "other").files, "kept none")):
        with pytest.raises(ConfigError) as caught:
            plan_prolonged(str(run.path), build_dir, 5, [], at=5)
        (problem,) = caught.value.problems
        assert (problem.code, problem.where) == ("run.no-checkpoint", "FROM")
        assert words in problem.what


def test_a_damaged_checkpoint_is_refused(parent, session):
    file = parent.checkpoint(4) / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError) as caught:
        forked(session, parent, 4)
    assert caught.value.codes == ["checkpoint.damaged"]


def test_an_interrupted_fork_ends_with_the_bytes_of_an_uninterrupted_one(parent, train, configure):
    config = configure(INIT_FROM=f"run:{parent.path.absolute()}@4", MAX_ITERS=6)
    whole = train(config, "whole").core()
    assert train(config, "stopped", stop_at=3).status.state is State.INTERRUPTED
    assert train(config, "stopped").core() == whole
    # The moments count: without them, the losses are others.
    anew = configure(INIT_FROM=f"run:{parent.path.absolute()}", MAX_ITERS=6)
    assert train(anew, "anew").core()["metrics.jsonl"] != whole["metrics.jsonl"]
