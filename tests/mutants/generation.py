"""Faults of generated text and of its way of sampling."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from gpt2 import generate
from gpt2.check import generation_checks
from gpt2.generate import SamplingOptions
from gpt2.model import GPT
from tests.mutants.mutant import Expected, Mutant, Plant, edited, replaced


def _sampled(name: str, expected: Expected, plant: Plant) -> Mutant:
    return Mutant(name, "baseline", {"decode": expected}, plant)


def _greedy(options: SamplingOptions, logits: torch.Tensor, generator: torch.Generator) -> int:
    return int(logits.argmax())


def _random(options: SamplingOptions, logits: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))


def _one_more(right: Any) -> Any:
    return lambda options, logits: right(
        dataclasses.replace(options, top_k=options.top_k and options.top_k + 1), logits
    )


def _inverse_temperature(right: Any) -> Any:
    return lambda options, logits: right(
        dataclasses.replace(options, temperature=1 / options.temperature), logits
    )


def _keeps_the_first_tokens(right: Any) -> Any:
    def first(model: GPT, prompt: torch.Tensor, *rest: Any) -> Iterator[int]:
        return right(model, prompt[: len(prompt) // 2], *rest)

    return first


def _ends_in_evaluation(right: Any) -> Any:
    def generated(model: GPT, *rest: Any) -> Iterator[int]:
        yield from right(model, *rest)

    def ended(model: GPT, *rest: Any) -> Iterator[int]:
        for token in generated(model, *rest):
            model.eval()
            yield token

    return ended


MUTANTS = (
    _sampled(
        "sampling is greedy", "sampled-tokens", replaced(SamplingOptions, "draw", lambda _: _greedy)
    ),
    _sampled(
        "greedy decoding draws",
        "sampled-tokens",
        replaced(SamplingOptions, "draw", lambda _: _random),
    ),
    _sampled(
        "top-k drops one token too few",
        "token-probability",
        replaced(SamplingOptions, "distribution", _one_more),
    ),
    _sampled(
        "the temperature multiplies logits",
        "token-probability",
        replaced(SamplingOptions, "distribution", _inverse_temperature),
    ),
    Mutant(
        "generated text has dropout",
        "baseline",
        {"decode": "generation-mode"},
        edited(generate, "_evaluating", "model.eval()", "model.train()"),
    ),
    Mutant(
        "the context is not shortened",
        "baseline",
        {"decode": "generated-logits"},
        replaced(generation_checks, "generate", _keeps_the_first_tokens),
    ),
    Mutant(
        "generation leaves the model in evaluation mode",
        "baseline",
        {"decode": "generation-side-effect"},
        replaced(generation_checks, "generate", _ends_in_evaluation),
    ),
)
