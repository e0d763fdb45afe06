"""Faults between configuration and model: studies, rules, fields."""

from dataclasses import replace
from typing import Any

import pytest

from gpt2.attention import attention
from gpt2.attention.config import AttentionConfig
from gpt2.attention.reciprocal import Reciprocal
from gpt2.check import cases
from gpt2.mlp.options import MlpConfig, MlpCrossTokenOptions
from gpt2.model_config import ModelConfig
from gpt2.shape import ModelShape
from tests.mutants.mutant import (
    MECHANISMS,
    Expected,
    Mutant,
    Plant,
    after_init,
    edited,
    nothing,
    replaced,
    step_also_sets,
    step_sets,
    then,
    together,
)


def _delta_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Resolve every step to the base configuration."""
    right = cases.resolve_step
    patch.setattr(
        cases,
        "resolve_step",
        lambda tree, base, study, step: (
            right(tree, base, study, step)[0],
            cases.resolve_config(tree, base),
        ),
    )


def _built(
    name: str,
    plant: Plant,
    *expected: str,
    step: str = "baseline",
    **named: Any,
) -> Mutant:
    finding: Expected = expected
    return Mutant(name, step, {"declared": finding}, plant, **named)


MUTANTS = (
    Mutant(
        "matrices of the token mix cost nothing",
        "golden-gate-cross",
        {"declared": ("declared-flops", "of the MLP")},
        then(
            MlpCrossTokenOptions,
            "cost",
            lambda out, *given: replace(out, other_flops=out.other_flops - 2 * out.weights),
        ),
    ),
    Mutant(
        "the output projection costs nothing",
        "baseline",
        {"declared": ("declared-flops", "of the attention")},
        edited(
            AttentionConfig,
            "cost",
            "4 * shape.n_embd * keys",
            "(4 * keys - 2 * shape.n_embd) * shape.n_embd",
        ),
    ),
    Mutant(
        "deltas are lost",
        "mla",
        {
            "distinct": ("distinct-configuration", "than baseline;"),
            "declared": ("step-setting", "^ATTENTION_PROJECTION_LATENT=True;"),
        },
        _delta_is_lost,
    ),
    Mutant(
        "an unmet dependency",
        "ra",
        {"resolve": ("resolved-configuration", "RECIPROCAL_WINDOW")},
        step_sets("ratio", "ra", {"RECIPROCAL_WINDOW": 64}),
        quick=True,
    ),
    Mutant(
        "a contradiction",
        "gqa",
        {"resolve": ("resolved-configuration", r"N_KV_HEAD\b.*\b5\b")},
        step_sets("mechanisms", "gqa", {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 5}),
        MECHANISMS,
    ),
    Mutant(
        "one more parameter is declared",
        "mla",
        {"declared": "parameter-count"},
        then(ModelConfig, "num_params", lambda out, self: out + 1),
        quick=True,
    ),
    Mutant(
        "a step exceeds its declared size",
        "mla",
        {"declared": ("size-change", r"against baseline; \+")},
        step_sets(
            "ratio",
            "mla",
            {"ATTENTION_PROJECTION_LATENT": True, "LATENT_DIM": 768, "MLP_SIZING_HIDDEN": True},
        ),
    ),
    Mutant(
        "the target size and its rule are ignored",
        "rope",
        {"declared": ("model-params", "^124,475,904 ")},
        together(
            step_also_sets("mechanisms", "rope", {"MLP_SIZING_PARAMS": True}),
            replaced(ModelConfig, "sized", lambda right: lambda self: self),
            nothing(MlpConfig, "check_params"),
        ),
        MECHANISMS,
    ),
    Mutant(
        "matrices of the gate are counted with M and G swapped",
        "golden-gate-cross",
        {"declared": "declared-ratio"},
        edited(
            MlpConfig,
            "cost",
            "m.cost(size.hidden, size.widths[m.name], site)",
            "m.cost(size.widths[m.name], size.hidden, site)",
        ),
    ),
    _built(
        "alpha is hard-coded in the module",
        after_init(Reciprocal, lambda self: setattr(self, "constant", 0.5)),
        "built-size",
        r"^RECIPROCAL_ALPHA=0\.3: 0\.3 in the model; 0\.5$",
        step="ra",
    ),
    _built(
        "rows are not computed as rows",
        replaced(attention, "choose_backend", lambda _: lambda *given: "sdpa"),
        "built-size",
        "^ATTENTION_BACKEND=rows",
        settings={"ATTENTION_BACKEND_ROWS": True},
    ),
    _built(
        "the vocabulary is multiplied instead of padded",
        replaced(
            ModelShape,
            "padded_vocab_size",
            lambda _: property(lambda self: self.vocab_size * self.vocab_multiple),
        ),
        "built-size",
        "^VOCAB_MULTIPLE=",
    ),
)
