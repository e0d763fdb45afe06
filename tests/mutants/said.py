"""Faults that the product's own errors detect: the text blames the product, not the configuration.

The configured step is valid, so no finding may advise the user to change it.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from gpt2 import config, evaluate
from gpt2.data import dataset
from gpt2.data.sampler import TrainSampler
from gpt2.training import setup
from lib.errors import Problem
from tests.mutants.mutant import Expected, Mutant, replaced, then

# Longer than the context of every small form.
_LONG = 300


def _blames_the_product(code: str, problem: str) -> Expected:
    """Return a finding with this code and problem that contains no command for the user."""
    what = f"not in the configuration: the small form of this step failed: {problem}"
    return code, "error in the product or in the check", what, "^(?!.*(menuconfig|type: ))"


def _with_block_size(factor: int) -> Callable[[Any], Any]:
    """Return a wrapper that multiplies the argument before the last."""

    def wrapper(right: Any) -> Any:
        return lambda *given: right(*given[:-2], factor * given[-2], given[-1])

    return wrapper


def _long_contexts_only(right: Any) -> Any:
    def problems(values: Any, attention: Any) -> Iterator[Problem]:
        yield from right(values, attention)
        if int(values["BLOCK_SIZE"]) < _LONG:
            what = f"BLOCK_SIZE: expected at least {_LONG}, got {values['BLOCK_SIZE']}"
            yield Problem(what, next="type: make menuconfig", code="config.out-of-range")

    return problems


MUTANTS = (
    Mutant(
        "the budget of an evaluation is lost",
        "baseline",
        {"evaluated": _blames_the_product("config.out-of-range", "EVAL_TOKENS: smaller than")},
        replaced(
            evaluate,
            "evaluation_windows",
            lambda right: lambda split, size, tokens, documents: right(split, size, 0, documents),
        ),
        quick=True,
    ),
    Mutant(
        "training windows of a thousand contexts",
        "ra",
        {"gradients": _blames_the_product("data.too-small", "BLOCK_SIZE: train split")},
        replaced(TrainSampler, "__init__", _with_block_size(1_000)),
    ),
    Mutant(
        "a vocabulary of bytes exceeds that of the model",
        "baseline",
        {"gradients": _blames_the_product("data.vocabulary-too-large", "the model's vocabulary")},
        then(dataset, "tokenizer_vocab_size", lambda out, name: out + 1000),
    ),
    Mutant(
        "a checkpoint never matches",
        "mla",
        {"reload": _blames_the_product("checkpoint.mismatch", ".*the checkpoint of step 3")},
        then(setup, "run_fingerprint", lambda out, session: {**out, "data": os.getpid()}),
    ),
    Mutant(
        "a rule rejects short contexts",
        "ra",
        {
            "causal": _blames_the_product("config.out-of-range", "BLOCK_SIZE: expected at least"),
            "reference": _blames_the_product(
                "config.out-of-range", "BLOCK_SIZE: expected at least"
            ),
        },
        replaced(config, "_head_problems", _long_contexts_only),
    ),
)
