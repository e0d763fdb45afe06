"""Faults of generated text and of its way of sampling."""

from collections.abc import Iterator
from typing import Any

import torch

from gpt2 import generate
from gpt2.check import generation_checks
from gpt2.model import GPT
from tests.mutants.mutant import Mutant, edited, replaced


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
