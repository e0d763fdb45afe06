"""Optimizers and pruners in the trainer: resumed, and in two processes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from gpt2.config import Config
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS
from lib.pruning.options import PRUNERS
from tests.gpt2.training.conftest import Trained

NO_SPAM = {"OPTIMIZER_ADAMWSPAM": None}
NO_MAGNITUDE = {"PRUNING_MAGNITUDE": None}
MOVEMENT = {**NO_MAGNITUDE, "PRUNING_MOVEMENT": True}
PRUNE = {**NO_SPAM, **NO_MAGNITUDE, "OPTIMIZER_ADAMWPRUNE": True}
SPAM = {"SPAM_INTERVAL": 3, "SPAM_WARMUP_STEPS": 2, "SPAM_CLIP_DELAY": 2, "SPAM_SPIKE_WINDOW": 3}
CLIP = {"GRAD_CLIP": "0.1"}
BF16 = {"PRECISION_BF16": True, "PRECISION_WHY": "half"}
_OTHERS: dict[str, dict[str, Any]] = {
    "sgd-movement": {**MOVEMENT, "OPTIMIZER_SGD": True, "SGD_NESTEROV": True},
    "adam-magnitude-layer": {"OPTIMIZER_ADAM": True, "PRUNING_SCOPE_LAYER": True},
    "adamw-magnitude-bf16": {"OPTIMIZER_ADAMW": True, **BF16},
    "muon-magnitude": {"OPTIMIZER_MUON": True},
    "adamwadv-movement-bf16": {**MOVEMENT, "OPTIMIZER_ADAMWADV": True, **BF16},
    "muon-movement-bf16": {**MOVEMENT, "OPTIMIZER_MUON": True, "MUON_SCALE_RMS": True, **BF16},
}
# Every optimizer, every pruner, every base; variants differ in formulas only.
TOGETHER = {name: {**NO_SPAM, **CLIP, **changes} for name, changes in _OTHERS.items()}
TOGETHER["adamwspam-magnitude"] = {**CLIP, **SPAM}
for _base, _variant, _more in (
    ("adam", "bitter0", {}),
    ("adamw", "bitter4", BF16),
    ("adamwadv", "bitter6", BF16),
    ("adamwspam", "bitter8", SPAM),
):
    _own = {
        f"ADAMWPRUNE_BASE_{_base.upper()}": True,
        f"ADAMWPRUNE_VARIANT_{_variant.upper()}": True,
    }
    TOGETHER[f"{_base}-{_variant}"] = {**PRUNE, **CLIP, **_own, **_more}


def test_every_optimizer_and_pruner_is_trained_here(configure):
    configs = [configure(**changes) for changes in TOGETHER.values()]
    assert {config.optimizer.name for config in configs} == set(OPTIMIZERS)
    assert {config.pruning.name for config in configs} == set(PRUNERS) - {"none"}
    bases = {c.optimizer.base.name for c in configs if c.optimizer.name == "adamwprune"}
    assert bases == set(ADAMWPRUNE_BASES)
    assert {config.machine.precision for config in configs} == {"fp32", "bf16"}


@pytest.fixture(scope="module")
def planned(configure) -> Callable[..., Config]:
    """Return a function that returns the short run of a case of TOGETHER with changed symbols."""
    return lambda name, **changes: configure(
        **TOGETHER[name], **{"DROPOUT": "0.0", "MAX_ITERS": 6} | changes
    )


@pytest.fixture(scope="module")
def alone(planned, lasting) -> Callable[[str], Trained]:
    """Return a function that trains a case in one process, once for all tests."""
    return cache(lambda name: lasting()(planned(name)))


@pytest.mark.parametrize("name", TOGETHER)
def test_interrupted_and_resumed_gives_the_same_bytes(planned, alone, train, name):
    whole = alone(name)
    train(planned(name), stop_at=4)
    assert train(planned(name)).core() == whole.core()
    final = whole.summary()["final"]
    assert final["sparsity"] == pytest.approx(0.5, abs=0.0025)
    # Clipping is active in every step.
    assert all(row["grad_norm"] > 0.1 for row in whole.rows("train"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOGETHER][::3])
def test_two_processes_leave_the_bytes_of_one_that_accumulates(planned, alone, together, name):
    """The sum a / 2 + b / 2 has a single order, and halving is exact."""
    both, _ = together(planned(name, GPUS=2, GRAD_ACCUMULATION=1))
    assert both.core() == alone(name).core()
