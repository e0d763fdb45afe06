"""Faults of start and resume: restored state and seeds."""

from typing import Any

import torch

from gpt2.training import session, setup
from gpt2.training.state import RankGenerators
from tests.mutants.mutant import Mutant, nothing, replaced

_LOSS = ("resumed-loss", "step 4;")


def from_the_first_step(right: Any) -> Any:
    """Return a loader that always starts at the first sequence."""

    def loader(*given: Any) -> Any:
        *others, _start_step, on_gpu, offered = given
        return right(*others, 0, on_gpu, offered)

    return loader


MUTANTS = (
    Mutant(
        "random numbers are not restored",
        "baseline",
        {"reload": _LOSS},
        nothing(RankGenerators, "load_state_dict"),
    ),
    Mutant(
        "optimizer is not restored",
        "baseline",
        {"reload": "resumed-weights"},
        nothing(torch.optim.Optimizer, "load_state_dict"),
        # The study's optimizer raises an error without its state.
        settings={"OPTIMIZER_ADAMW": True},
    ),
    Mutant(
        "data starts over after a resume",
        "mla",
        {"reload": _LOSS},
        replaced(session, "BatchLoader", from_the_first_step),
    ),
    Mutant(
        "nothing is seeded",
        "baseline",
        {"paired": "dropout-stream"},
        nothing(setup, "seed_all"),
    ),
)
