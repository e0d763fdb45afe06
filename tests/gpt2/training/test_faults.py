"""The comparisons that hold the loop to its word turn red on a fault planted in it.

Each is one that a test of this package makes; here it is made with the fault and without.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.config import Config
from gpt2.data.loader import BatchLoader
from gpt2.evaluate import Evaluator
from gpt2.training.loop import optimizer_step
from gpt2.training.state import RankGenerators, TrainingSession
from lib.files import canonical_json
from lib.runs import checkpoint
from tests.gpt2.training.test_resume import die_at_call

Configure = Callable[..., Config]
Results = dict[str, Any]
# Property check: takes train, configure, patch and the results of a run without a fault; returns
# whether the property holds.
Proof = Callable[[Callable, Configure, pytest.MonkeyPatch, Results], bool]
Plant = Callable[[pytest.MonkeyPatch], None]


def repeated(
    train: Callable, configure: Configure, patch: pytest.MonkeyPatch, whole: Results
) -> bool:
    """Return whether results are independent of the generators' state before the run."""
    torch.manual_seed(999)
    return bool(train(configure()).core() == whole)


def resumed(
    train: Callable, configure: Configure, patch: pytest.MonkeyPatch, whole: Results
) -> bool:
    """Return whether an interrupted and resumed run has the bytes of an uninterrupted one."""
    train(configure(), stop_at=6)
    return bool(train(configure()).core() == whole)


def evaluated(
    train: Callable, configure: Configure, patch: pytest.MonkeyPatch, whole: Results
) -> bool:
    """Return whether training is independent of the evaluation interval."""
    often, never = train(configure(), "often"), train(configure(EVAL_INTERVAL=0), "never")
    weights = [run.files.weights.read_bytes() for run in (often, never)]
    return bool(often.rows("train") == never.rows("train") and weights[0] == weights[1])


def logged(
    train: Callable, configure: Configure, patch: pytest.MonkeyPatch, whole: Results
) -> bool:
    """Return whether the log has the exact measured losses."""
    measured: list[float] = []

    def noted(session: TrainingSession, *rest: Any) -> Any:
        found = optimizer_step(session, *rest)
        measured.append(found.loss.item())
        return found

    patch.setattr("gpt2.training.loop.optimizer_step", noted)
    return [row["loss"] for row in train(configure()).rows("train")] == measured


def killed(
    train: Callable, configure: Configure, patch: pytest.MonkeyPatch, whole: Results
) -> bool:
    """Return whether a run killed while saving has only complete checkpoints."""
    child = os.fork()
    if child == 0:
        die_at_call("torch.save", 1, patch)
        train(configure())
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    found = train(configure(), stop_at=5)
    return "WARN" not in found.lines() and "resumes at iteration 4" in found.lines()


def _never_restores_randomness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankGenerators, "load_state_dict", lambda self, state: None)


def _never_restores_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.optim.Optimizer, "load_state_dict", lambda self, state: None)


def _starts_the_data_over(patch: pytest.MonkeyPatch) -> None:
    def loader(*given: Any) -> BatchLoader:
        *others, _, on_gpu, offered = given
        return BatchLoader(*others, 0, on_gpu, offered)

    patch.setattr("gpt2.training.state.BatchLoader", loader)


def _draws_in_an_evaluation(patch: pytest.MonkeyPatch) -> None:
    evaluate = Evaluator.__call__

    def drawing(*given: Any) -> Any:
        torch.rand(())
        return evaluate(*given)

    patch.setattr(Evaluator, "__call__", drawing)


def _never_seeds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gpt2.training.loop.seed_all", lambda *seeds: None)


def _saves_in_place(patch: pytest.MonkeyPatch) -> None:
    def save(folder: Path, step: int, weights: Any, state: Any, *rest: Any) -> None:
        final = folder / f"step-{step:08d}"
        final.mkdir()
        checkpoint._write(final, step, weights, state)

    patch.setattr("lib.runs.checkpoint.save_checkpoint", save)


def _rounds_its_log(patch: pytest.MonkeyPatch) -> None:
    def rounded(record: dict[str, Any]) -> str:
        short = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
        return canonical_json(short)

    patch.setattr("gpt2.training.records.canonical_json", rounded)


FAULTS: dict[Plant, Proof] = {
    _never_restores_randomness: resumed,
    _never_restores_the_optimizer: resumed,
    _starts_the_data_over: resumed,
    _draws_in_an_evaluation: evaluated,
    _never_seeds: repeated,
    _saves_in_place: killed,
    _rounds_its_log: logged,
}


@pytest.mark.parametrize("proof", dict.fromkeys(FAULTS.values()))
def test_properties_hold_without_a_fault(
    train: Callable,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Results,
    proof: Proof,
) -> None:
    assert configure().model.shape.dropout > 0
    assert proof(train, configure, monkeypatch, uninterrupted)


@pytest.mark.parametrize("plant", FAULTS)
def test_each_fault_breaks_a_property(
    train: Callable,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Results,
    plant: Plant,
) -> None:
    plant(monkeypatch)
    assert not FAULTS[plant](train, configure, monkeypatch, uninterrupted)
