"""Faults of the way from a configuration to a model: studies, rules, fields."""

from dataclasses import replace

import pytest

from gpt2.ablation import STUDIES
from gpt2.attention.options import AttentionConfig
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.check import cases
from gpt2.config import ModelConfig
from gpt2.mlp.options import MlpConfig
from lib.binding import Value
from tests.mutants.mutant import MECHANISMS, Mutant, Plant, after_init, replaced, then


def _step_sets(study: str, slug: str, changes: dict[str, Value]) -> Plant:
    """A study whose step changes something else than it says."""
    right = STUDIES[study]
    steps = tuple(replace(s, set=changes) if s.slug == slug else s for s in right.steps)
    return lambda patch: patch.setitem(STUDIES, study, replace(right, steps=steps))


def _delta_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Every step is the base: one model behind all names."""
    patch.setattr(
        cases, "resolve_step", lambda tree, base, study, step: cases.resolve_config(tree, base)
    )


MUTANTS = (
    Mutant(
        "a step is its parent",
        "two names for one configuration",
        "ra-golden",
        {"distinct": "another configuration than ra; found: the same configuration"},
        _step_sets("ratio", "ra-golden", {"RECIPROCAL": True}),
    ),
    Mutant(
        "deltas are lost",
        "the base stands behind every name",
        "mla",
        {
            "distinct": "another configuration than baseline; found: the same configuration",
            "declared": "ATTENTION_PROJECTION_LATENT=True; found: another member of its choice",
        },
        _delta_is_lost,
    ),
    Mutant(
        "an unmet dependency",
        "a symbol without the one that it depends on",
        "ra",
        {"resolve": "the step resolves; found: .*RECIPROCAL_WINDOW"},
        _step_sets("ratio", "ra", {"RECIPROCAL_WINDOW": 64}),
        quick=True,
    ),
    Mutant(
        "a number out of range",
        "a window of no token",
        "sliding",
        {"resolve": "the step resolves; found: .*SLIDING_WINDOW"},
        _step_sets(
            "mechanisms", "sliding", {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 0}
        ),
        MECHANISMS,
    ),
    Mutant(
        "a contradiction",
        "heads that cannot be grouped",
        "gqa",
        {"resolve": "the step resolves; found: .*N_KV_HEAD: 5 does not divide"},
        _step_sets("mechanisms", "gqa", {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 5}),
        MECHANISMS,
    ),
    Mutant(
        "an unknown symbol",
        "a word that no Kconfig has",
        "golden",
        {"resolve": "the step resolves; found: .*MLP_RATIOS"},
        _step_sets("ratio", "golden", {"MLP_RATIOS": "2.5"}),
    ),
    Mutant(
        "score terms are dead",
        "no term is ever read from a configuration",
        "ra",
        {"distinct": "another configuration than baseline; found: the same configuration"},
        replaced(
            AttentionConfig,
            "from_values",
            lambda right: lambda values: replace(right(values), terms=()),
        ),
    ),
    Mutant(
        "mechanisms are dead",
        "no mechanism is ever read from a configuration",
        "golden-gate",
        {"distinct": "another (configuration|function or another training) than golden"},
        replaced(
            MlpConfig,
            "from_values",
            lambda right: lambda values: replace(right(values), mechanisms=()),
        ),
    ),
    Mutant(
        "a field does not read its symbol",
        "alpha is 0.5 whatever is configured",
        "ra",
        {"declared": r"RECIPROCAL_ALPHA=0\.3 in the model; found: 0\.5"},
        after_init(ReciprocalOptions, lambda self: object.__setattr__(self, "alpha", 0.5)),
    ),
    Mutant(
        "one more parameter is declared",
        "the count is not of what is built",
        "mla",
        {"declared": "parameters, as declared"},
        then(ModelConfig, "num_params", lambda out, self: out + 1),
        quick=True,
    ),
    Mutant(
        "a step breaks its promise of size",
        "a latent width of six times the configured one",
        "mla",
        {"declared": r"parameters against baseline; found: \+"},
        _step_sets(
            "ratio",
            "mla",
            {
                "ATTENTION_PROJECTION_LATENT": True,
                "LATENT_DIM": 768,
                "MLP_SIZING_HIDDEN": True,
            },
        ),
    ),
)
