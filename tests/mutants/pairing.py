"""Faults of the random numbers that steps share: initial weights, dropout, order of the data."""

from dataclasses import replace
from typing import Any

import torch

from gpt2 import model
from gpt2.check import process_checks, short_run
from gpt2.data import sampler
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.session import TrainingSession
from gpt2.training.state import DataOrder, RankGenerators, TrainState
from lib.runs import rng
from tests.mutants.mutant import Expected, Mutant, Plant, after_init, nothing, replaced, then

_INIT = "initial-stream"
_DATA = "paired-data"
_DROPOUT = "dropout-stream"


@torch.no_grad()
def _in_order(out: None, self: GPT, seed: int, *stream: int) -> None:
    """Draw all matrices again from one generator, in the order of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in self.parameters():
        if parameter.ndim >= 2 and parameter.any():
            parameter.normal_(0, float(parameter.std()), generator=generator)


def _embeddings_of_the_baseline(right: Any) -> Any:
    def init_weights(self: GPT, seed: int, stream: int = 0) -> None:
        right(self, seed)
        first = self.wte.weight.detach().clone()
        right(self, seed, stream)
        with torch.no_grad():
            self.wte.weight.copy_(first)

    return init_weights


def _streams(owner: Any, rename: Any) -> Plant:
    """Return a plant that passes (seed, stream) through ``rename`` before the seed is derived."""
    return replaced(
        owner, "stream_seed", lambda right: lambda seed, stream: right(*rename(seed, stream))
    )


def _model_enters_seed(right: Any) -> Any:
    return lambda self, seed, *stream: right(self, seed + len(list(self.parameters())), *stream)


def _batches_seeded(change: Any) -> Plant:
    """Return a plant that adds ``change(session)`` to the seed of the data."""

    def make(right: Any) -> Any:
        def batches(self: TrainingSession) -> Any:
            seed = self.config.seed + change(self)
            return right(replace(self, config=replace(self.config, seed=seed)))

        return batches

    return replaced(TrainingSession, "batches", make)


def _optimizer_enters_seed(right: Any) -> Any:
    def open_session(config: Any, *given: Any, **named: Any) -> Any:
        seed = config.seed + len(config.optimizer.name)
        return right(replace(config, seed=seed), *given, **named)

    return open_session


def _of_rank_0(right: Any) -> Any:
    def load(self: RankGenerators, state: dict[str, Any]) -> None:
        right(self, state | {"torch": state["torch"][:1].repeat(len(state["torch"]), 1)})

    return load


def _reseeded(out: None, session: TrainingSession, *rest: Any) -> None:
    rng.seed_all(session.config.seed)


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


MUTANTS = (
    _mutant(
        "one generator draws all matrices",
        then(GPT, "init_weights", _in_order),
        _INIT,
        step="golden-gate",
    ),
    _mutant(
        "the model enters the initial seed",
        replaced(GPT, "init_weights", _model_enters_seed),
        _INIT,
        step="mla",
        quick=True,
    ),
    _mutant(
        "two blocks share streams",
        _streams(model, lambda seed, stream: (seed, stream.replace("h.1.", "h.0."))),
        _INIT,
    ),
    _mutant(
        "initial weights ignore SEED",
        _streams(model, lambda seed, stream: (1, stream)),
        _INIT,
        "SEED=",
    ),
    _mutant(
        "data ignores SEED",
        replaced(sampler, "stream_seed", lambda right: lambda seed, stream: right(1, stream)),
        _DATA,
    ),
    _mutant(
        "dropout ignores SEED",
        replaced(rng, "dropout_seed", lambda right: lambda seed, rank: right(1, rank)),
        _DROPOUT,
    ),
    _mutant(
        "the rank enters the seed of the data",
        _batches_seeded(lambda session: session.group.rank),
        _DATA,
        "^rank 1 of 2",
    ),
    _mutant(
        "data is drawn from the stream of a matrix",
        _streams(sampler, lambda seed, stream: (seed, "init/wte.weight")),
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
        replaced(RankGenerators, "load_state_dict", _of_rank_0),
        "dropout-resume",
    ),
    _mutant(
        "a resumed run seeds dropout again",
        then(process_checks, "resume", _reseeded),
        "resumed-loss",
        check="reload",
    ),
    _mutant(
        "the sampler skips the first sequence",
        replaced(
            sampler,
            "sequence_offsets",
            lambda right: lambda key, positions, first, count: right(
                key, positions, first + 1, count
            ),
        ),
        _DATA,
        "other offsets",
        step="ra",
    ),
    _mutant(
        "the optimizer enters the seed",
        replaced(short_run, "open_session", _optimizer_enters_seed),
        _INIT,
        r"SEED=\d+, INIT_STREAM=0 and the name alone",
    ),
    _mutant(
        "EVAL_TOKENS enters the seed of the data",
        _batches_seeded(lambda session: session.config.data.eval_tokens),
        _DATA,
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
        "warm-up steps stay in the weights",
        "baseline",
        {"reload": ("resumed-loss", "step 4")},
        nothing(TrainState, "load_weights"),
    ),
)
