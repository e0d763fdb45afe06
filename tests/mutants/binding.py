"""Faults between a symbol and what it names, and between a step's name and what is built."""

from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from gpt2 import train
from gpt2.attention import attention
from gpt2.attention.config import PATTERNS, PROJECTIONS
from gpt2.attention.options import (
    GroupedOptions,
    LatentOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
)
from gpt2.attention.reciprocal import Reciprocal
from gpt2.check import pairing_checks
from gpt2.config import TrainConfig
from gpt2.data.options import DataOptions
from gpt2.mlp.options import MlpConfig
from gpt2.model_config import ModelConfig
from gpt2.shape import ModelShape
from gpt2.training import session, setup
from lib.env.machine import require_world_size
from lib.env.ranks import ProcessRank
from lib.optim.options import AdamwspamOptions
from lib.optim.schedule import ScheduleOptions
from lib.optim.spam import Adamwspam
from lib.pruning.options import MagnitudeOptions
from tests.mutants.mutant import (
    Expected,
    Mutant,
    Plant,
    after_init,
    replaced,
    step_inherits,
    then,
)


def _reads(owner: type[Any], **symbols: str) -> Plant:
    """Return a plant that binds fields of ``owner`` to other symbols."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for field in fields(owner):
            if field.name in symbols:
                metadata = dict(field.metadata) | {"symbol": symbols[field.name]}
                patch.setattr(field, "metadata", MappingProxyType(metadata))

    return plant


def _becomes(owner: type[Any], name: str, change: Any) -> Plant:
    """Return a plant that passes a frozen field through ``change`` after the constructor."""
    return after_init(owner, lambda self: object.__setattr__(self, name, change(vars(self)[name])))


def _hard_coded_clip(right: Any) -> Any:
    return lambda parameters, clip, norm: right(parameters, 1.0, norm)


def _share_of_attention(right: Any) -> Any:
    return lambda self, site: right(replace(self, share=self.share / self.ratio), site)


def _bound(
    name: str,
    plant: Plant,
    *expected: str,
    step: str = "baseline",
    **named: Any,
) -> Mutant:
    finding: Expected = expected
    return Mutant(name, step, {"bound": finding}, plant, **named)


def _usual_betas(self: Adamwspam) -> None:
    for group in self.param_groups:
        group["betas"] = 0.9, 0.95


def _with_gpus_as_batch(right: Any) -> Any:
    """Return a loader whose micro-batches have one sequence."""

    def loader(*given: Any) -> Any:
        sampler, config, global_batch, _, *others = given
        return right(sampler, config, global_batch, 1, *others)

    return loader


def _open_accumulating(right: Any) -> Any:
    """Return an open_session that expects as many processes as accumulated micro-batches."""

    def open_session(config: Any, *given: Any, **named: Any) -> Any:
        require_world_size(ProcessRank(1, 2), config.train.grad_accumulation)
        return right(config, *given, **named)

    return open_session


MUTANTS = (
    _bound(
        "a registered projection has no option in Kconfig",
        replaced(PROJECTIONS, "_options", lambda known: {**known, "shared": GroupedOptions}),
        "selectable",
        "shared is registered, Kconfig has no ATTENTION_PROJECTION_SHARED$",
        quick=True,
    ),
    _bound(
        "an option of Kconfig selects no pattern",
        replaced(PATTERNS, "_options", lambda known: {k: known[k] for k in ("full", "nsa")}),
        "selectable",
        "ATTENTION_PATTERN_SLIDING, no .* is registered",
    ),
    _bound(
        "the betas are exchanged",
        _reads(AdamwspamOptions, beta1="ADAM_BETA2", beta2="ADAM_BETA1"),
        "named-reader",
        r"^AdamwspamOptions\.beta1 .*ADAM_BETA2$",
        quick=True,
    ),
    _bound(
        "epsilon reads the weight decay",
        _reads(AdamwspamOptions, eps="WEIGHT_DECAY"),
        "one-reader",
        "WEIGHT_DECAY.*eps",
    ),
    _bound(
        "the final rate reads the peak",
        _reads(ScheduleOptions, min_learning_rate="LEARNING_RATE"),
        "one-reader",
        r"LEARNING_RATE.*\.min_learning_rate",
    ),
    _bound(
        "half the band",
        _becomes(ReciprocalOptions, "window", lambda window: window // 2),
        "bound-value",
        "RECIPROCAL_WINDOW=64; 32$",
        step="ra",
    ),
    _bound(
        "sparsity reads the end of the ramp",
        _reads(MagnitudeOptions, target="PRUNING_RAMP_END"),
        "one-reader",
        r"PRUNING_RAMP_END.*\.target",
        step="pruned-50",
    ),
    _bound(
        "heads and layers are exchanged",
        _reads(ModelShape, n_head="N_LAYER", n_layer="N_HEAD"),
        "named-reader",
        r"^ModelShape\.n_layer .*N_HEAD$",
    ),
    _bound(
        "dropout is a constant",
        _becomes(ModelShape, "dropout", lambda dropout: 0.1),
        "bound-value",
        r"^ModelShape\.dropout is DROPOUT=.*; 0\.1$",
    ),
    _bound(
        "alpha is hard-coded in the module",
        after_init(Reciprocal, lambda self: setattr(self, "constant", 0.5)),
        "built-size",
        r"^RECIPROCAL_ALPHA=0\.3: 0\.3 in the model; 0\.5$",
        step="ra",
    ),
    _bound(
        "clipping has a silent minimum",
        _becomes(TrainConfig, "grad_clip", lambda clip: max(clip, 0.5)),
        "bound-value",
        r"GRAD_CLIP=0\.37; 0\.5$",
    ),
    _bound(
        "k is a tenth",
        _becomes(RaCrossTokenOptions, "topk", lambda k: k // 10),
        "bound-value",
        "RA_CROSS_TOKEN_TOPK=8; 0$",
        step="ract",
    ),
    _bound(
        "the evaluation reads the length of the sample",
        _reads(DataOptions, eval_tokens="SAMPLE_TOKENS"),
        "one-reader",
        r"SAMPLE_TOKENS.*DataOptions\.eval_tokens",
    ),
    Mutant(
        "the clipping norm is hard-coded",
        "baseline",
        {"optimized": "driven-update"},
        replaced(torch.nn.utils, "clip_grads_with_norm_", _hard_coded_clip),
    ),
    Mutant(
        "the learning rate is hard-coded",
        "baseline",
        {"optimized": "driven-update"},
        replaced(train, "learning_rate_at", lambda _: lambda *given: 6e-4),
    ),
    Mutant(
        "micro-batches have the number of processes",
        "baseline",
        {"paired": "micro-batches"},
        replaced(session, "BatchLoader", _with_gpus_as_batch),
    ),
    Mutant(
        "one process is taken for one of GRAD_ACCUMULATION",
        "baseline",
        {"paired": "ranks.count-mismatch"},
        replaced(pairing_checks, "open_session", _open_accumulating),
    ),
    _bound(
        "the last block is left out",
        then(ModelConfig, "sites", lambda out, self: out[:-1]),
        "built-size",
        "^N_LAYER=12: 12 in the model; 11$",
    ),
    Mutant(
        "the share is one of attention",
        "golden-gate",
        {"declared": ("mlp-share", r"^MLP_SHARE=0\.15 of the MLP for 1 .*; mlp_attn_gate 0\.0")},
        replaced(MlpConfig, "size", _share_of_attention),
    ),
    Mutant(
        "a step lacks its mechanism",
        "golden-gate",
        {"distinct": ("distinct-configuration", "than golden;")},
        replaced(
            MlpConfig,
            "from_values",
            lambda right: lambda values: replace(right(values), mechanisms=()),
        ),
    ),
    Mutant(
        "a step has another parent",
        "mla-ract",
        {"resolve": ("resolved-configuration", "unknown field {MLP_RATIO}")},
        step_inherits("ratio", "mla-ract", "mla"),
    ),
    _bound(
        "rows are not computed as rows",
        replaced(attention, "choose_backend", lambda _: lambda *given: "sdpa"),
        "built-size",
        "^ATTENTION_BACKEND=rows",
        settings={"ATTENTION_BACKEND_ROWS": True},
    ),
    _bound(
        "the latent width derives from the context",
        replaced(
            LatentOptions,
            "width",
            lambda _: lambda self, shape: self.latent_dim or shape.block_size,
        ),
        "built-size",
        "^LATENT_DIM=0",
        step="mla",
    ),
    _bound(
        "the vocabulary is multiplied instead of padded",
        replaced(
            ModelShape,
            "padded_vocab_size",
            lambda _: property(lambda self: self.vocab_size * self.vocab_multiple),
        ),
        "built-size",
        "^VOCAB_MULTIPLE=",
    ),
    Mutant(
        "weight decay is hard-coded",
        "baseline",
        {"optimized": "driven-update"},
        replaced(setup, "parameter_groups", lambda right: lambda module, decay: right(module, 0.1)),
    ),
    Mutant(
        "the betas are hard-coded",
        "baseline",
        {"optimized": "driven-update"},
        after_init(Adamwspam, _usual_betas),
    ),
)
