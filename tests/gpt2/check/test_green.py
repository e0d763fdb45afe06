"""Checks pass on correct code, including configurations that once caused false alarms."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.check import CHECKS
from gpt2.check.cases import CheckCase, config_layers_to_check, plan_cases
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.errors import Problem
from tests.check_cases import run_in_process

pytestmark = pytest.mark.usefixtures("torch_as_before")

NARROW = "MODEL_SIZE_CUSTOM=y N_EMBD=9 N_HEAD=3 N_LAYER=2 MLP_SIZING_PARAMS=y MLP_CROSS_TOKEN=y"
WIDE = "MODEL_SIZE_CUSTOM=y N_EMBD=204 ATTENTION_PROJECTION_LATENT=y LATENT_DIM=894 MLP_LATENT=y"
ONE = "MODEL_SIZE_CUSTOM=y N_LAYER=4 N_HEAD=1 N_EMBD=71 BLOCK_SIZE=20"
EXTREMES = "SPAM_THETA=1e12 SPAM_SPIKE_THRESHOLD=1e6 SPAM_MOMENT_DAMPING=1 SPAM_INTERVAL=1"
PROFILE = "OPTIMIZER_ADAMWPRUNE=y ADAMWPRUNE_VARIANT_BITTER4=y PRUNING_INCLUDE_EMBEDDINGS=y"
RIGHT = {
    # SGD lacks Adam's symbols, and updates some weights by less than fp32 resolution.
    "sgd": ("gradients,optimized", "OPTIMIZER_SGD=y MLP_ATTN_GATE=y"),
    # Muon moves pruned weights too, before the pruner zeroes them again.
    "muon": ("optimized,pruned,reload", "OPTIMIZER_MUON=y MUON_SCALE_RMS=y PRUNING_MAGNITUDE=y"),
    # Three whole rows of logits do not fit into a chunk; a short context has few logits.
    "rows": ("reference", "VOCAB_MULTIPLE=864"),
    "short": ("reference", "BLOCK_SIZE=8"),
    # A sixth of the width is less than half of the multiple.
    "narrow": (
        "declared",
        "MODEL_SIZE_CUSTOM=y N_EMBD=12 N_HEAD=1 ATTENTION_PROJECTION_LATENT=y",
    ),
    # The rounding of the hidden width is a large part of so small an MLP.
    "narrow share": ("declared,distinct", f"{NARROW} MLP_SHARE=0.245"),
    # A latent wider than GPT-2's MLP, and tied scalars, which require a wider MLP.
    "wide latent": ("reference,long", f"{WIDE} MLP_HIDDEN=2934 MLP_LATENT_TYING_SCALAR=y"),
    # The weights of a run, which the folder of the checks does not have.
    "weights": ("gradients,paired", "INIT_FROM=run:trained-s1"),
    # Gates are not pruned, and rows of padding are zero beside what is.
    "gates": (
        "pruned",
        "PRUNING_MOVEMENT=y PRUNING_INCLUDE_EMBEDDINGS=y VOCAB_MULTIPLE=1024 MLP_ATTN_GATE=y "
        "MLP_SIZING_RATIO=y",
    ),
    # The base of AdamWPrune is AdamW, and the variant trains longer: the ramp ends in the last step.
    "stretched": (
        "optimized,pruned,budgeted,reload",
        "OPTIMIZER_ADAMWPRUNE=y ADAMWPRUNE_VARIANT_BITTER2=y PRUNING_RAMP_END=0.9",
    ),
    # Thresholds far above any gradient, no damping, resets in every step.
    "extremes": (
        "optimized,budgeted",
        f"OPTIMIZER_ADAMWSPAM=y {EXTREMES} SPAM_CLIP_DELAY=1 SPAM_WARMUP_STEPS=0 GRAD_CLIP=0 "
        "BUDGET_TIME=y WARMUP_STEPS=0",
    ),
    # The profile has matrices at its cap, and embeddings in the model's order.
    "profile": ("pruned", f"{PROFILE} PRUNING_SPARSITY=0.8"),
    # Two gates start at 1/2.
    "two branches": (
        "declared,reference,causal,decode",
        "ATTENTION_PROJECTION_GROUPED=y ATTENTION_PATTERN_NSA=y NSA_BRANCH_COMPRESSED=n",
    ),
    # Few weights of attention may all be dropped, or all be kept.
    "one head": ("precise", f"{ONE} ATTENTION_PROJECTION_LATENT=y LATENT_DIM=46"),
    # Tensors without memory have no numbers that could be finite.
    "anomaly": ("full_size", "DETECT_ANOMALY=y"),
    # Every gradient of the mechanism is zero, in the model and in the reference.
    "strength 0": ("reference", "MLP_ATTN_GATE=y MLP_ATTN_GATE_ALPHA=0"),
    # The threshold drops all weights of every row.
    "tau": (
        "reference",
        "MLP_CROSS_TOKEN=y MLP_CROSS_TOKEN_SPARSITY_RMS=y MLP_CROSS_TOKEN_TAU=10",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_correct_code_passes(name):
    checks, settings = RIGHT[name]
    config = resolve_config(KconfigTree(), [parse_command_line_settings(settings)])
    case = CheckCase("a", "a", "a", config)
    results = run_in_process(case, [CHECKS[check] for check in checks.split(",")], {}).results
    assert {check: result.findings for check, result in results.items() if result.findings} == {}


@pytest.mark.slow
def test_a_step_of_a_study_passes():
    # The first step alone has the table of a study checked.
    cases = plan_cases(config_layers_to_check(Path(), "gpt2-ratio-ablation"), "full")
    (case,) = cases.chosen
    parent = {c.slug: c for c in cases.every if c.slug == case.parent}
    usual = [check for check in CHECKS.values() if not check.by_name]
    results = run_in_process(case, usual, parent).results
    states = {name: result.state for name, result in results.items()}
    prunes = case.config.pruning.name != "none"
    common = [check.name for check in usual if prunes or not check.pruning]
    assert states == dict.fromkeys(common, "passed") | {"data": "absent"}, results


def test_a_step_that_does_not_resolve_reports_its_problems():
    (case,) = plan_cases(config_layers_to_check(Path(), "gpt2-124m")).chosen
    problem = Problem("no", "step ra", code="config.conflict")
    broken = replace(case, config=None, problems=(problem,))
    results = run_in_process(broken, list(CHECKS.values()), {}).results
    assert {name: r.state for name, r in results.items()} == {"resolve": "failed"}
    (finding,) = results["resolve"].findings
    assert (finding.property, finding.found) == ("resolved-configuration", str(problem))


def test_a_number_of_an_axis_is_in_the_model():
    settings = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "BLOCK_SIZE=256,512 DROPOUT=0,0.1"}
    layers = [
        *config_layers_to_check(Path(), "gpt2-124m"),
        ConfigLayer.of("matrix", "a test", settings),
    ]
    case = plan_cases(layers).chosen[-1]
    assert case.delta == {"BLOCK_SIZE": "512", "DROPOUT": "0.1"}
    for delta, properties in ((case.delta, []), ({"BLOCK_SIZE": "256"}, ["step-setting"])):
        case = replace(case, delta=delta)
        findings = run_in_process(case, [CHECKS["declared"]], {}).results["declared"].findings
        assert [finding.property for finding in findings] == properties


def test_sparse_attention_has_no_form_of_a_device_on_a_cpu():
    (case,) = plan_cases(config_layers_to_check(Path(), "nsa-quickstart"), "nsa").chosen
    results = run_in_process(case, [CHECKS["device"]], {}).results
    assert results["device"].findings == []
