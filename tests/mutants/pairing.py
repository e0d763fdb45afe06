"""Faults of the random numbers that steps share: initial weights, dropout, order of the data."""

from typing import Any

import torch

from gpt2 import model
from gpt2.data import loader, sampler
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training import rng, state
from gpt2.training.state import DataOrder
from tests.mutants.mutant import Expected, Mutant, Plant, after_init, edited, nothing, replaced

_INIT = "initial-stream"
_DATA = "paired-data"
_DROPOUT = "dropout-stream"


def _embeddings_of_the_baseline(right: Any) -> Any:
    def init_weights(self: GPT, seed: int, stream: int = 0) -> None:
        right(self, seed)
        first = self.wte.weight.detach().clone()
        right(self, seed, stream)
        with torch.no_grad():
            self.wte.weight.copy_(first)

    return init_weights


def _model_enters_seed(right: Any) -> Any:
    return lambda self, seed, *stream: right(self, seed + len(list(self.parameters())), *stream)


def _of_rank_0(right: Any) -> Any:
    def load(state: dict[str, Any], *place: Any) -> None:
        right(state | {"torch": state["torch"][:1].repeat(len(state["torch"]), 1)}, *place)

    return load


def _mutant(
    name: str,
    plant: Plant,
    *expected: str,
    step: str = "baseline",
    check: str = "paired",
    **named: Any,
) -> Mutant:
    finding: Expected = expected[0] if len(expected) == 1 else expected
    return Mutant(name, step, {check: finding}, plant, **named)


def _with_gpus_as_batch(right: Any) -> Any:
    """Return a loader whose micro-batches have one sequence."""

    def loader(*given: Any) -> Any:
        sampler, config, global_batch, _, *others = given
        return right(sampler, config, global_batch, 1, *others)

    return loader


MUTANTS = (
    _mutant(
        "the model enters the initial seed",
        replaced(GPT, "init_weights", _model_enters_seed),
        _INIT,
        step="mla",
        quick=True,
    ),
    _mutant(
        "data ignores SEED",
        replaced(sampler, "stream_seed", lambda right: lambda seed, stream: right(1, stream)),
        _DATA,
    ),
    _mutant(
        "the evaluator draws random numbers",
        after_init(Evaluator, lambda self: torch.rand(len(self.windows))),
        _DROPOUT,
        "before step 1$",
    ),
    _mutant(
        "ranks have equal dropout",
        replaced(rng, "dropout_seed", lambda right: lambda seed, rank: right(seed, 0)),
        "dropout-per-rank",
    ),
    _mutant(
        "ranks resume the dropout of rank 0",
        replaced(rng, "restore_rng_state", _of_rank_0),
        "dropout-resume",
    ),
    Mutant(
        "the digest of the data order is lost",
        "baseline",
        {"reload": "resumed-data-order"},
        nothing(DataOrder, "load_state_dict"),
    ),
    Mutant(
        "an A/A step shares the embeddings of the baseline",
        "baseline",
        {"paired": ("initial-stream", "INIT_STREAM=1")},
        replaced(model.GPT, "init_weights", _embeddings_of_the_baseline),
    ),
    Mutant(
        "micro-batches have the number of processes",
        "baseline",
        {"paired": "micro-batches"},
        replaced(state, "BatchLoader", _with_gpus_as_batch),
    ),
    Mutant(
        "parts of ranks overlap",
        "baseline",
        {"paired": ("paired-data", "^rank 1 of 2")},
        edited(
            loader.BatchLoader,
            "__init__",
            "rank * global_batch // world_size",
            "rank * micro_batch",
        ),
    ),
)
