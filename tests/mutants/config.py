"""Faults between configuration and model: studies, rules, fields."""

from dataclasses import replace

import pytest

from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import ReciprocalOptions
from gpt2.check import cases
from gpt2.mlp.options import MlpConfig, MlpCrossTokenOptions
from gpt2.model_config import ModelConfig
from tests.mutants.mutant import (
    MECHANISMS,
    Mutant,
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
        "a step is its parent",
        "ra-golden",
        {"distinct": ("distinct-configuration", "than ra;")},
        step_sets("ratio", "ra-golden", {"RECIPROCAL": True}, title="reciprocal"),
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
        "a number out of range",
        "sliding",
        {"resolve": ("resolved-configuration", "SLIDING_WINDOW")},
        step_sets(
            "mechanisms", "sliding", {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 0}
        ),
        MECHANISMS,
    ),
    Mutant(
        "a contradiction",
        "gqa",
        {"resolve": ("resolved-configuration", r"N_KV_HEAD\b.*\b5\b")},
        step_sets("mechanisms", "gqa", {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 5}),
        MECHANISMS,
    ),
    Mutant(
        "an unknown symbol",
        "golden",
        {"resolve": ("resolved-configuration", "MLP_RATIOS")},
        step_sets("ratio", "golden", {"MLP_RATIOS": "2.5"}),
    ),
    Mutant(
        "score terms are dead",
        "ra",
        {"distinct": ("distinct-configuration", "than baseline;")},
        replaced(
            AttentionConfig,
            "from_values",
            lambda right: lambda values: replace(right(values), terms=()),
        ),
    ),
    Mutant(
        "mechanisms are dead",
        "golden-gate",
        {"distinct": ("distinct-configuration", "than golden;")},
        replaced(
            MlpConfig,
            "from_values",
            lambda right: lambda values: replace(right(values), mechanisms=()),
        ),
    ),
    Mutant(
        "a field does not read its symbol",
        "ra",
        {"bound": ("bound-value", r"RECIPROCAL_ALPHA=0\.3; 0\.5$")},
        after_init(ReciprocalOptions, lambda self: object.__setattr__(self, "alpha", 0.5)),
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
)
