"""Faults of the whole model and of the training loop.

B batch, T tokens, X = B·T, V vocabulary.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor, nn

from gpt2 import model
from gpt2.model import GPT
from gpt2.training import loop, state
from gpt2.training.records import RecordWriter
from gpt2.training.state import TrainingSession
from lib.runs import checkpoint
from tests.mutants.mutant import (
    Mutant,
    after_init,
    edited,
    nothing,
    replaced,
    then,
)

_RELOAD = "resumed-weights"


@torch.no_grad()
def _by_chance(out: None, self: GPT, *seed: int) -> None:
    self.wte.weight.add_(int.from_bytes(os.urandom(2), "big") * 1e-6)


def _frozen(self: GPT) -> None:
    self.h[0].ln_1.weight.requires_grad_(False)


def _padding_counts(right: Any) -> Any:
    return lambda hidden, weight, targets, vocab, *rest: right(
        hidden, weight, targets, weight.size(0), *rest
    )


def _without_biases(right: Any) -> Any:
    def parameter_groups(module: nn.Module, weight_decay: float) -> list:
        found = right(module, weight_decay)
        for group in found:
            group["params"] = [(n, p) for n, p in group["params"] if not n.endswith("c_fc.bias")]
        return found

    return parameter_groups


def _restored_without(key: str) -> Any:
    """Return a plant that skips one entry when a session is restored."""

    def make(right: Any) -> Any:
        def load(self: TrainingSession, state: dict) -> None:
            right(self, state | {key: self.state_dict()[key]})

        return load

    return replaced(TrainingSession, "load_state_dict", make)


def _narrowed(right: Any) -> Any:
    def save(folder: Any, iteration: int, weights: dict, *rest: Any) -> None:
        narrow = {name: weight.bfloat16().float() for name, weight in weights.items()}
        right(folder, iteration, narrow, *rest)

    return save


def _not_finite(self: GPT) -> None:
    self.h[0].ln_1.weight.register_hook(lambda gradient: gradient * math.nan)


def _gradient_of_the_next_token(out: Tensor, *rest: Any) -> Tensor:
    """Add 0, with a derivative with respect to the next token."""
    later_BTC = out.roll(-1, 1)
    return out + (later_BTC - later_BTC.detach())


def _without_the_last_token(right: Any) -> Any:
    def hidden(self: GPT, idx_BT: Tensor, cache: Any = None) -> Any:
        return right(self, nn.functional.pad(idx_BT[:, :-1], (0, 1)), cache)

    return hidden


_LOSS = ("resumed-loss", "loss 1 of 3")


MUTANTS = (
    Mutant(
        "norm is frozen",
        "golden",
        {"declared": ("trainable-parameters", r"h\.0\.ln_1\.weight")},
        after_init(GPT, _frozen),
    ),
    Mutant(
        "padding is part of the softmax",
        "baseline",
        {"reference": ("reference-formulas", "^the loss")},
        replaced(model, "linear_cross_entropy", _padding_counts),
    ),
    Mutant(
        "the loss of a large batch has all logits at once",
        "baseline",
        {"reference": ("loss-chunks", "all logits")},
        edited(model, "linear_cross_entropy", "<= pieces.block", ">= pieces.block"),
    ),
    Mutant(
        "the loss of a small batch is smoothed",
        "baseline",
        {"reference": ("reference-formulas", "^the loss from all logits at once")},
        edited(
            model,
            "linear_cross_entropy",
            "F.cross_entropy(_wide(logits_XV), targets_X,",
            "F.cross_entropy(_wide(logits_XV), targets_X, label_smoothing=0.1,",
        ),
    ),
    Mutant(
        "initial weights are not seeded",
        "baseline",
        {"paired": ("initial-stream", r"wte\.weight"), "parallel": "same-initial-weights"},
        then(GPT, "init_weights", _by_chance),
        quick=True,
    ),
    Mutant(
        "parameters are missing from the optimizer",
        "golden-gate",
        {"gradients": ("optimizer-groups", r"h\.0\.mlp\.c_fc\.bias .*; in 0$")},
        replaced(state, "parameter_groups", _without_biases),
    ),
    Mutant(
        "records of later steps remain after a resume",
        "baseline",
        {"reload": "resumed-records"},
        nothing(RecordWriter, "rewind"),
    ),
    Mutant(
        "statistics are recorded again after a resume",
        "baseline",
        {"reload": ("resumed-records", r"statistics \(2, 3\); \(2, 0\)")},
        edited(TrainingSession, "load_state_dict", 'state["told_at"]', "0"),
    ),
    Mutant(
        "checkpoint loses the position in the data",
        "mla",
        {"reload": ("resumed-step", "step 3; 0$")},
        _restored_without("iteration"),
    ),
    Mutant(
        "checkpoint rounds the weights",
        "full",
        {"reload": _RELOAD},
        replaced(checkpoint, "save_checkpoint", _narrowed),
        quick=True,
    ),
    Mutant(
        "ranks exchange after the first micro-batch",
        "baseline",
        {"parallel": "same-gradient"},
        edited(loop, "accumulate_gradients", "i == len(micro_batches)", "i == 1"),
    ),
    Mutant(
        "a rank records its own loss",
        "baseline",
        {"parallel": "same-loss"},
        edited(loop, "accumulate_gradients", "state.group.add(total) / state.group.size", "total"),
    ),
    Mutant(
        "initial weights are too small",
        "baseline",
        {"reference": ("initial-std", r"0\.0200 .*wte\.weight")},
        lambda patch: patch.setattr(model, "INIT_STD", 0.0002),
    ),
    Mutant(
        "a gradient is NaN",
        "baseline",
        {"gradients": ("finite-gradient", r"h\.0\.ln_1\.weight; NaN")},
        after_init(GPT, _not_finite),
    ),
    Mutant(
        "a gradient reads the next token",
        "baseline",
        {"causal": "causal-gradient"},
        then(GPT, "hidden", _gradient_of_the_next_token),
    ),
    Mutant(
        "the last token is not read",
        "baseline",
        {"causal": "token-affects-logits"},
        replaced(GPT, "hidden", _without_the_last_token),
    ),
    Mutant(
        "random numbers are not restored",
        "baseline",
        {"reload": _LOSS},
        nothing(state, "restore_rng_state"),
    ),
)
