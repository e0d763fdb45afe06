"""Faults of a start and of a resume: what a run is given back, and what it is seeded with."""

from typing import Any

import torch

from gpt2.training import session, start
from gpt2.training.session import Session
from tests.mutants.mutant import Mutant, nothing, replaced

_LOSS = "the same loss at step 4; found: .* after a reload"


def from_the_first_step(right: Any) -> Any:
    """A loader that begins with the first sequence wherever the run stands."""

    def loader(*given: Any) -> Any:
        *others, start_step, on_gpu, offered = given
        return right(*others, 0, on_gpu, offered)

    return loader


MUTANTS = (
    Mutant(
        "random numbers are not restored",
        "a resumed run's dropout draws what its first steps drew",
        "baseline",
        {"reload": _LOSS},
        nothing(Session, "_set_rng"),
    ),
    Mutant(
        "optimizer is not restored",
        "a resumed run's moments start at zero",
        "baseline",
        {"reload": "the same (loss at step 5|weights in the end)"},
        nothing(torch.optim.Optimizer, "load_state_dict"),
        # The study's own has no answer at all without its state.
        settings={"OPTIMIZER_ADAMW": True},
    ),
    Mutant(
        "data starts over after a resume",
        "the loader is not told the step",
        "mla",
        {"reload": _LOSS},
        replaced(session, "BatchLoader", from_the_first_step),
    ),
    Mutant(
        "nothing is seeded",
        "a run's dropout goes on where another use of the generator ended",
        "baseline",
        {"repeat": "the same loss at step 1 for the same seed"},
        nothing(start, "seed_all"),
    ),
)
