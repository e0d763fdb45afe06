"""Faults of the whole model and of the training loop.

B batch, T tokens, X = B·T, V vocabulary.
"""

import math
import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpt2 import loss, model, train
from gpt2.data.sampler import TrainSampler
from gpt2.loss import LogitsChunks
from gpt2.model import GPT
from gpt2.training import setup, step
from gpt2.training.records import RecordWriter
from gpt2.training.session import TrainingSession
from gpt2.training.state import TrainState
from lib.env.process_group import ProcessGroup
from lib.runs import checkpoint
from tests.mutants.mutant import (
    LOGITS,
    Mutant,
    after_init,
    edited,
    nothing,
    replaced,
    then,
    together,
)

_RELOAD = "resumed-weights"


@torch.no_grad()
def _by_chance(out: None, self: GPT, *seed: int) -> None:
    self.wte.weight.add_(int.from_bytes(os.urandom(2), "big") * 1e-6)


@torch.no_grad()
def _by_rank(out: None, self: GPT, *seed: int) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    self.wpe.weight.add_(rank * 1e-3)


@torch.no_grad()
def _without_depth(out: None, self: GPT, *seed: int) -> None:
    for block in self.h:
        block.attn.c_proj.weight.mul_(math.sqrt(2 * len(self.h)))


def _without_positions(self: GPT, idx_BT: Tensor, cache: Any = None) -> Tensor:
    x_BTC, state = self.dropout(self.wte(idx_BT)), model.BlockState()
    for block in self.h:
        x_BTC, state = block(x_BTC, state)
    return self.ln_f(x_BTC)


def _cut_off(right: Any) -> Any:
    def forward(self: Any, x_BTC: Tensor, *rest: Any) -> Any:
        return right(self, x_BTC.detach(), *rest)

    return forward


def _remembering(out: Tensor, self: GPT, *rest: Any) -> Tensor:
    """Add the mean of the previous call."""
    before = vars(self).get("before", 0.0)
    vars(self)["before"] = out.mean()
    return out + before


def _untied(self: GPT) -> None:
    self.lm_head = nn.Linear(self.wte.embedding_dim, self.wte.num_embeddings, bias=False)


def _frozen(self: GPT) -> None:
    self.h[0].ln_1.weight.requires_grad_(False)


def _padding_counts(right: Any) -> Any:
    return lambda hidden, weight, targets, vocab, *rest: right(
        hidden, weight, targets, weight.size(0), *rest
    )


def _ignored_count(out: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> Any:
    return out * (targets != loss.IGNORE_INDEX).sum() / targets.numel()


def _last_alone(right: Any) -> Any:
    """Use only the last micro-batch."""
    return lambda session, batches: right(session, batches[-1:])


def _summed(right: Any) -> Any:
    def backward(session: TrainingSession, batches: list) -> Tensor:
        total = right(session, batches)
        for parameter in session.state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(len(batches))
        return total

    return backward


def _keeping_gradients(right: Any) -> Any:
    def optimizer_step(session: TrainingSession, batches: list, lr: float) -> Any:
        zero, session.state.optimizer.zero_grad = (
            session.state.optimizer.zero_grad,
            lambda **named: None,
        )
        try:
            return right(session, batches, lr)
        finally:
            session.state.optimizer.zero_grad = zero

    return optimizer_step


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
            right(self, state | {key: self.state.state_dict()[key]})

        return load

    return replaced(TrainingSession, "load_state_dict", make)


def _narrowed(right: Any) -> Any:
    def save(folder: Any, iteration: int, weights: dict, *rest: Any) -> None:
        narrow = {name: weight.bfloat16().float() for name, weight in weights.items()}
        right(folder, iteration, narrow, *rest)

    return save


def _uphill(right: Any) -> Any:
    def backward(session: TrainingSession, batches: list) -> Tensor:
        total = right(session, batches)
        for parameter in session.state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()
        return total

    return backward


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


@torch.no_grad()
def _drifting(out: Any, session: TrainingSession, *rest: Any) -> Any:
    """Change weights by chance after the third update."""
    if session.state.iteration >= 2:
        session.state.model.wpe.weight.add_(int.from_bytes(os.urandom(2), "big") * 1e-6)
    return out


def _sized_by_the_first_batch(out: Tensor, self: GPT, *rest: Any) -> Tensor:
    scale_B = vars(self).setdefault("scale", torch.ones(len(out), dtype=out.dtype))
    return out * scale_B[:, None, None]


def _remembering_training(out: Tensor, self: GPT, *rest: Any) -> Tensor:
    if self.training:
        vars(self)["seen"] = float(out.detach().mean())
    return out + vars(self).get("seen", 0.0)


MUTANTS = (
    Mutant(
        "positions are left out",
        "baseline",
        {"gradients": ("nonzero-gradient", r"wpe\.weight;"), "reference": LOGITS},
        replaced(GPT, "hidden", lambda _: _without_positions),
    ),
    Mutant(
        "attention is detached from its input",
        "ra-mla-ract",
        {"reference": ("reference-formulas", r"gradient of wte\.weight")},
        replaced(model.Attention, "forward", _cut_off),
    ),
    Mutant(
        "model depends on the previous call",
        "mla",
        {
            "reference": ("check.exception", "RuntimeError: .*backward through the graph a second"),
            "causal": "causal-logits",
        },
        then(GPT, "hidden", _remembering),
    ),
    Mutant(
        "head is not tied",
        "baseline",
        {"declared": "parameter-count", "gradients": ("nonzero-gradient", r"lm_head\.weight;")},
        after_init(GPT, _untied),
    ),
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
        "ignored targets count",
        "baseline",
        {"reference": ("reference-formulas", "^the loss")},
        then(model, "linear_cross_entropy", _ignored_count),
    ),
    Mutant(
        "the loss of a large batch has all logits at once",
        "baseline",
        {"reference": ("loss-chunks", "all logits")},
        edited(model, "linear_cross_entropy", "<= pieces.block", ">= pieces.block"),
    ),
    Mutant(
        "a chunk has every token",
        "baseline",
        {"reference": "loss-chunks"},
        edited(LogitsChunks, "chunks", "-(-tokens // chunks)", "tokens"),
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
        "initial weights depend on the rank",
        "full",
        {"parallel": "same-initial-weights"},
        then(GPT, "init_weights", _by_rank),
    ),
    Mutant(
        "order of the data is not seeded",
        "baseline",
        {"paired": ("paired-data", "other offsets")},
        after_init(
            TrainSampler, lambda self: setattr(self, "_seed", int.from_bytes(os.urandom(7), "big"))
        ),
    ),
    Mutant(
        "dropout is not seeded",
        "baseline",
        {"paired": "dropout-stream"},
        replaced(setup, "seed_all", lambda _: lambda seed, rank=0: torch.seed()),
    ),
    Mutant(
        "only the last micro-batch counts",
        "baseline",
        {"parallel": "same-gradient"},
        replaced(step, "accumulate_gradients", _last_alone),
    ),
    Mutant(
        "micro-batches add up",
        "mla-golden",
        {"optimized": "driven-update"},
        replaced(step, "accumulate_gradients", _summed),
    ),
    Mutant(
        "gradients are not zeroed",
        "ra",
        {"optimized": "driven-update"},
        replaced(train, "optimizer_step", _keeping_gradients),
    ),
    Mutant(
        "training ascends",
        "ract",
        {"optimized": "driven-update"},
        replaced(step, "accumulate_gradients", _uphill),
    ),
    Mutant(
        "learning rate has no schedule",
        "baseline",
        {"budgeted": "budget-learning-rate"},
        replaced(train, "learning_rate_at", lambda _: lambda options, *rest: options.learning_rate),
    ),
    Mutant(
        "parameters are missing from the optimizer",
        "golden-gate",
        {"gradients": ("optimizer-groups", r"h\.0\.mlp\.c_fc\.bias .*; in 0$")},
        replaced(setup, "parameter_groups", _without_biases),
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
        {"reload": ("resumed-records", "statistics at step 3, .*steps 2 and 0 ")},
        edited(TrainState, "load_state_dict", 'state["told_at"]', "0"),
    ),
    Mutant(
        "an evaluation is repeated after a resume",
        "baseline",
        {"reload": ("resumed-records", "evaluation at step 2 .*steps 0 and 3 ")},
        edited(TrainState, "load_state_dict", 'state["evaluated_at"]', "0"),
    ),
    Mutant(
        "checkpoint loses the optimizer",
        "baseline",
        {"reload": _RELOAD},
        _restored_without("optimizer"),
    ),
    Mutant(
        "checkpoint loses the generators", "baseline", {"reload": _RELOAD}, _restored_without("rng")
    ),
    Mutant(
        "checkpoint loses the position in the data",
        "mla",
        {"reload": ("resumed-step", "step 3; .*step 0$")},
        _restored_without("iteration"),
    ),
    Mutant(
        "checkpoint loses the progress",
        "golden",
        {"reload": _RELOAD},
        _restored_without("progress"),
    ),
    Mutant(
        "checkpoint rounds the weights",
        "full",
        {"reload": _RELOAD},
        replaced(checkpoint, "save_checkpoint", _narrowed),
    ),
    Mutant(
        "ranks do not share gradients",
        "golden-gate-cross",
        {"parallel": "same-gradient"},
        together(
            replaced(ProcessGroup, "share_gradients", lambda _: lambda self, module, _: module),
            replaced(ProcessGroup, "exchange", lambda _: lambda self, module, now: nullcontext()),
        ),
    ),
    Mutant(
        "ranks never exchange",
        "mla",
        {"parallel": "same-gradient"},
        replaced(ProcessGroup, "exchange", lambda _: lambda self, module, now: module.no_sync()),
    ),
    Mutant(
        "ranks exchange after the first micro-batch",
        "baseline",
        {"parallel": "same-gradient"},
        edited(step, "accumulate_gradients", "i == len(micro_batches)", "i == 1"),
    ),
    Mutant(
        "a rank records its own loss",
        "baseline",
        {"parallel": "same-loss"},
        edited(
            step, "accumulate_gradients", "session.group.add(total) / session.group.size", "total"
        ),
    ),
    Mutant(
        "dropout masks differ in the backward pass",
        "ra",
        {"gradients": "recomputed-gradient"},
        replaced(model, "checkpoint", lambda right: partial(right, preserve_rng_state=False)),
        settings={"GRAD_CHECKPOINTING": True, "COMPILE": False},
    ),
    Mutant(
        "gradients are not clipped",
        "baseline",
        {"optimized": "driven-update"},
        nothing(torch.nn.utils, "clip_grads_with_norm_"),
    ),
    Mutant(
        "every batch is the same",
        "golden",
        {"paired": "paired-data"},
        replaced(TrainSampler, "offsets", lambda _: lambda self, first, count: list(range(count))),
    ),
    Mutant(
        "initial weights are too small",
        "baseline",
        {"reference": ("initial-std", r"0\.0200 .*wte\.weight")},
        lambda patch: patch.setattr(model, "INIT_STD", 0.0002),
    ),
    Mutant(
        "residual projections start too large",
        "mla-golden",
        {"reference": ("initial-std", r"0\.00\d+ .*h\.0\.attn\.c_proj\.weight")},
        then(GPT, "init_weights", _without_depth),
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
        "an update draws random numbers",
        "baseline",
        {"reload": "resumed-weights"},
        then(train, "optimizer_step", _drifting),
    ),
    Mutant(
        "a buffer has the size of the first batch",
        "baseline",
        {"causal": ("check.exception", "RuntimeError: The size of tensor")},
        then(GPT, "hidden", _sized_by_the_first_batch),
    ),
    Mutant(
        "an evaluation reads a mean of training",
        "baseline",
        {"reference": ("reference-formulas", "^the loss")},
        then(GPT, "hidden", _remembering_training),
    ),
)
