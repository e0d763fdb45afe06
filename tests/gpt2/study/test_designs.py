"""Matrices, sweeps and designs: axes, features, cells, and the runs that are planned from them."""

import io
import itertools
import sys

import pytest

from gpt2.check.cases import plan_cases
from gpt2.records.compare import declared_axes
from gpt2.study import view
from gpt2.study.designs import (
    Level,
    axis_levels,
    design_cells,
    feature_levels,
    parse_factors,
    resolve_design,
    resolve_grid,
    slug,
)
from gpt2.study.plan import config_layers, declared_verdicts, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.project import ROOT
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.errors import error_of


@pytest.fixture
def combined(small_tree):
    """Return a function that resolves axes, or the features of a design, to values."""

    def combine(text, design="", **base):
        layers = [ConfigLayer.of("config", ".config", base)]

        def resolve(cell):
            layer = ConfigLayer.of("axis", cell.slug, cell.delta)
            return small_tree.resolve([*layers, layer]).values

        if design:
            features = parse_factors(small_tree, text, "WHERE", feature_levels)
            return resolve_design(design_cells(design, [on for (on,) in features]), resolve)
        axes = parse_factors(small_tree, text, "WHERE", axis_levels)
        return resolve_grid(small_tree, axes, resolve)

    return combine


def test_an_axis_may_be_a_choice_or_any_symbol(combined):
    block, _ = combined("OPTIMIZER=adamw,spam N_LAYER=1,2 RATE=3e-4,0.1")
    cells = [variant for variant, _ in block]
    assert len(cells) == 8
    assert cells[0].slug == "adamw-n-layer-1-rate-3e-4"
    assert cells[0].delta == {"OPTIMIZER_ADAMW": True, "N_LAYER": "1", "RATE": "3e-4"}
    assert [*cells[7].levels.values()] == ["spam", "2", "0.1"]


@pytest.mark.parametrize(
    ("text", "design", "codes", "part"),
    [
        ("", "", ["design.empty"], ""),
        ("N_LAYER", "", ["design.malformed-axis"], "'N_LAYER'"),
        ("N_LAYER=1,,2", "", ["design.malformed-axis"], "'N_LAYER=1,,2'"),
        ("NO_SUCH=1", "", ["config.unknown-symbol"], "NO_SUCH: "),
        ("OPTIMISER=adamw", "", ["config.unknown-symbol"], "OPTIMIZER"),
        ("OPTIMIZER=adamw,sgd", "", ["config.invalid-value"], "'sgd' is not one of adamw, spam"),
        ("N_LAYER=1 N_LAYER=2", "", ["design.duplicate"], "N_LAYER"),
        ("N_LAYER=1,1", "", ["design.duplicate"], "n-layer-1"),
        ("SEED=1,2", "", ["design.seed-axis"], "SEED: "),
        # All at once.
        ("RATE OPTIMIZER=sgd", "", ["design.malformed-axis", "config.invalid-value"], "'RATE'"),
        ("", "factorial", ["design.empty"], ""),
        ("NO_SUCH", "factorial", ["config.unknown-symbol"], "NO_SUCH: "),
        ("GATE GATE", "factorial", ["design.duplicate"], "GATE"),
        ("PRUNING", "factorial", ["config.not-settable"], "PRUNING_NONE, PRUNING_MOVEMENT"),
        ("GATE=", "factorial", ["design.malformed-feature"], "'GATE='"),
        ("GATE+SEED=3", "factorial", ["design.seed-axis"], "SEED: "),
    ],
)
def test_an_invalid_axis_or_feature_is_an_error_with_its_location(
    combined, text, design, codes, part
):
    error = error_of(combined, text, design)
    assert error.codes == codes and {problem.where for problem in error.problems} == {"WHERE"}
    assert part in error.problems[0].what


def test_a_matrix_is_the_cross_product_without_what_kconfig_forbids(combined):
    block, (problem,) = combined("OPTIMIZER=adamw,spam PRUNING=none,movement")
    slugs = [variant.slug for variant, _ in block]
    assert slugs == ["adamw-none", "adamw-movement", "spam-none"]
    assert block[1][0].delta == {"OPTIMIZER_ADAMW": True, "PRUNING_MOVEMENT": True}
    assert block[1][0].levels == {"OPTIMIZER": "adamw", "PRUNING": "movement"}
    assert problem.what.startswith("spam-movement: ") and "OPTIMIZER_ADAMW=y" in problem.what
    assert problem.code == "config.unmet-dependency"


def test_an_axis_that_does_not_apply_gives_one_run(combined):
    block, left_out = combined("PRUNING=none,movement SPARSITY=0.3,0.6,0.9 N_LAYER=1,2")
    slugs = [variant.slug for variant, _ in block]
    assert slugs[:2] == ["none-n-layer-1", "none-n-layer-2"] and len(block) == 2 + 3 * 2
    assert [p.what.partition(": ")[0] for p in left_out] == slugs[:2]
    assert [p.code for p in left_out] == ["design.not-applicable"] * 2
    assert all("SPARSITY" in p.what for p in left_out)


@pytest.mark.parametrize(
    ("axes", "base", "code", "part"),
    [
        ("N_LAYER=2,9 PRUNING=none,movement", {}, "out-of-range", "N_LAYER=9: "),
        ("PRUNING=none,movement", {"OPTIMIZER_SPAM": True}, "unmet-dependency", "OPTIMIZER_ADAMW"),
        ("PRUNING=none SPARSITY=0.3,0.4", {}, "unmet-dependency", "SPARSITY=0.3: "),
    ],
)
def test_a_value_valid_in_no_cell_is_an_error(combined, axes, base, code, part):
    problem = error_of(combined, axes, **base).problems[0]
    assert problem.code == f"config.{code}" and part in problem.what


def test_a_very_long_name_is_cut_and_stays_unique(combined):
    block, _ = combined(f"RATE={'9' * 130},{'9' * 131}")
    assert len({variant.slug for variant, _ in block}) == 2
    assert all(len(variant.slug) < 140 for variant, _ in block)


FIVE = ["RATE", "GATE", "WIDE", "CROSS", "N_LAYER"]
# The enabled features of each cell, from the definition of the design.
DEFINED = {
    "leave_one_out": [{*FIVE}, *({*FIVE} - {name} for name in FIVE)],
    "add_one_in": [set(), *({name} for name in FIVE)],
    "cumulative": [set(FIVE[:count]) for count in range(6)],
    "factorial": [set(c) for count in range(6) for c in itertools.combinations(FIVE, count)],
}


@pytest.mark.parametrize("design", DEFINED)
def test_a_design_has_the_cells_of_its_definition_and_lists_what_is_forbidden(combined, design):
    block, left_out = combined("RATE=0.5 GATE WIDE CROSS N_LAYER=4", design)
    # The only rule of the tree.
    legal = [on for on in DEFINED[design] if "CROSS" not in on or "GATE" in on]
    trained = [{f for f, level in v.levels.items() if level == "on"} for v, _ in block]
    assert sorted(map(sorted, trained)) == sorted(map(sorted, legal))
    assert len(left_out) == len(DEFINED[design]) - len(legal)
    assert all("CROSS=y: " in problem.what for problem in left_out)
    assert {problem.code for problem in left_out} <= {"config.unmet-dependency"}
    assert bool(left_out) == (design != "cumulative")


@pytest.mark.parametrize(
    ("design", "parents"),
    [
        ("leave_one_out", {"all": "", "no-gate": "all", "no-wide": "all"}),
        ("add_one_in", {"none": "", "gate": "none", "wide": "none"}),
        ("cumulative", {"none": "", "plus-gate": "none", "plus-wide": "plus-gate"}),
        ("factorial", {"none": "", "wide": "none", "gate": "none", "gate-wide": "none"}),
    ],
)
def test_each_cell_is_compared_with_the_cell_it_changes(combined, design, parents):
    block, _ = combined("GATE WIDE", design)
    assert {variant.slug: variant.parent for variant, _ in block} == parents


def test_two_combinations_of_one_name_are_refused():
    names = ("GATE", "GATE_WIDE", "WIDE_CROSS", "CROSS")
    features = [Level(name, "on", slug(name), {}) for name in names]
    error = error_of(resolve_design, design_cells("factorial", features), lambda cell: cell)
    assert error.codes == ["run.duplicate-name"] and "gate-wide-cross" in str(error)


@pytest.mark.parametrize("feature", ["N_LAYER=2", "PRUNING_NONE"])
@pytest.mark.parametrize("design", DEFINED)
def test_a_feature_that_the_base_has_is_an_error(combined, design, feature):
    (problem,) = error_of(combined, f"GATE {feature}", design).problems
    assert problem.code == "design.no-effect" and slug(feature.split("=")[0]) in problem.where


def test_what_is_left_out_is_skipped_as_a_parent(combined):
    block, left_out = combined("WIDE CROSS GATE", "cumulative")
    parents = {variant.slug: variant.parent for variant, _ in block}
    assert parents == {"none": "", "plus-wide": "none", "plus-gate": "plus-wide"}
    assert [variant.number for variant, _ in block] == [0, 1, 3]
    assert [str(p).split(":")[0] for p in left_out] == ["plus-cross"]


def test_a_design_without_its_baseline_is_an_error(combined):
    features = "OPTIMIZER_SPAM PRUNING_MOVEMENT GATE"
    (problem,) = error_of(combined, features, "leave_one_out").problems
    assert (problem.where, problem.code) == ("all", "design.invalid-baseline")
    assert problem.what.startswith("PRUNING_MOVEMENT=y: ") and "OPTIMIZER_ADAMW=y" in problem.what


# Plans.

MATRIX = {"TEST_MATRIX_MODE": True}


def test_a_matrix_and_a_sweep_are_planned_from_their_axes(planned):
    plan = planned(**MATRIX)
    slugs = ["adamw-none", "adamw-magnitude", "adamwspam-none", "adamwspam-magnitude"]
    assert [run.variant.slug for run in plan.runs] == slugs
    assert plan.runs[3].config.optimizer.name == "adamwspam"
    assert plan.study == "matrix" and not plan.left_out
    # A sweep is a list of trainings, whatever the configuration is.
    plan = planned(RA_MLA_ABLATION_MODE=True, sweep="LEARNING_RATE=1e-3,3e-3 DROPOUT=0.2")
    assert plan.study == "sweep" and plan.folder.name == "sweep"
    rates = [run.config.schedule.learning_rate for run in plan.runs]
    assert rates == [1e-3, 3e-3] and plan.runs[0].config.model.shape.dropout == 0.2


def test_a_swept_batch_keeps_the_global_batch(planned):
    plan = planned(sweep="BATCH_SIZE=4,8,16")
    found = [(r.config.train.batch_size, r.config.train.grad_accumulation) for r in plan.runs]
    assert found == [(4, 16), (8, 8), (16, 4)]
    with pytest.raises(ConfigError, match="BATCH_SIZE=5 x GRAD_ACCUMULATION=12 x GPUS=1 is 60"):
        planned(sweep="BATCH_SIZE=4,5")
    plan = planned(sweep="GLOBAL_BATCH=32,64")
    assert [r.config.train.grad_accumulation for r in plan.runs] == [4, 8]


def test_very_many_combinations_need_a_yes(planned, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    layers, rates = ",".join(map(str, range(1, 49))), ",".join(f"0.{i:02}" for i in range(20))
    error = error_of(planned, **MATRIX, TEST_MATRIX_AXES=f"N_LAYER={layers} DROPOUT={rates}")
    assert error.codes == ["usage.no-terminal"]
    assert "960" in str(error) and "YES=1" in str(error)


def test_a_design_is_planned_from_its_features(planned):
    features = "RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5 ATTENTION_PROJECTION_LATENT MLP_LATENT"
    plan = planned(**MATRIX, ABLATION_DESIGN_ADD_ONE_IN=True, ABLATION_FEATURES=features)
    named = ["none", "reciprocal", "mlp-sizing-ratio", "attention-projection-latent"]
    assert [run.variant.slug for run in plan.runs] == named
    (skipped,) = plan.left_out
    assert skipped.code == "config.unmet-dependency"
    assert "mlp-latent" in str(skipped) and "ATTENTION_PROJECTION_LATENT=y" in str(skipped)
    assert plan.runs[2].config.model.mlp.built_ratio(plan.runs[2].config.model.sites()[0]) > 2.4


FEATURES = MATRIX | {"ABLATION_FEATURES": "RECIPROCAL RA_CROSS_TOKEN MLP_ATTN_GATE"}


def test_a_full_design_is_planned_and_gets_the_factorial_rule(planned):
    plan = planned(**FEATURES, ABLATION_DESIGN_FACTORIAL=True)
    assert len(plan.runs) == 8 and not plan.left_out
    assert plan.runs[0].variant.slug == "none"
    declared = declared_verdicts(plan)
    assert (declared.interactions, declared.rule.variance) == (True, "factorial")
    names = [contrast.name for contrast in declared.declared]
    assert names == ["A RECIPROCAL", "B RA_CROSS_TOKEN", "C MLP_ATTN_GATE", "AB", "AC", "BC"]
    other = declared_verdicts(planned(**FEATURES, ABLATION_DESIGN_ADD_ONE_IN=True))
    assert (other.interactions, other.rule.variance) == (None, "shared")
    own = planned(**FEATURES, ABLATION_DESIGN_FACTORIAL=True, VERDICT_VARIANCE_OWN=True)
    assert declared_verdicts(own).rule.variance == "own"


@pytest.mark.parametrize("design", ["ADD_ONE_IN", "LEAVE_ONE_OUT"])
def test_no_name_of_a_design_is_cut(planned, design):
    plan = planned(**FEATURES, **{f"ABLATION_DESIGN_{design}": True})
    titles = {run.variant.title for run in plan.runs}
    assert "RA_CROSS_TOKEN" in " ".join(titles) and not any("=" in title for title in titles)
    assert ("no feature" in titles) == (design != "LEAVE_ONE_OUT")
    text = view.plan_text(plan, view.look(plan), 80)
    assert "…" not in text and "title" not in text.splitlines()[0]
    assert all(run.label in text for run in plan.runs)


def test_one_command_measures_nine_runs_of_native_sparse_attention(tmp_path):
    plan = make_plan(defconfig_layers(ROOT, "nsa-perf"), tmp_path)
    found = [(r.config.model.shape.block_size, r.config.values["NSA_RANGES"]) for r in plan.runs]
    assert found == [(s, r) for s in (512, 1024, 2048) for r in ("lists", "merged", "adaptive")]
    assert {run.config.train.max_iters for run in plan.runs} == {200}
    assert plan.left_out == []


def test_a_matrix_has_the_compiler_as_an_axis(planned):
    plan = planned(**MATRIX, TEST_MATRIX_AXES="COMPILE=n,y WARMUP_STEPS=0,1")
    assert [run.config.machine.compile for run in plan.runs] == [False, False, True, True]
    # The compiler is declared, in every cell: it is the axis.
    axes = declared_axes(plan, [RunRecord(RunDir(run.path)) for run in plan.runs], "")
    assert [axes[run.path] for run in plan.runs] == 4 * [{"COMPILE", "WARMUP_STEPS"}]


@pytest.mark.parametrize(
    ("sweep", "settings"),
    [
        ("", {"SINGLE_TRAINING": True}),
        ("", MATRIX | {"TEST_MATRIX_AXES": "DROPOUT=0,0.1"}),
        ("", {"RA_MLA_ABLATION_MODE": True, "RA_MLA_ABLATION_STEPS": "0,3"}),
        ("LEARNING_RATE=1e-3,2e-3", {}),
    ],
)
def test_a_paper_compiles_only_beside_the_same_run_without_it(planned, configure, sweep, settings):
    refused = error_of(planned, sweep=sweep, **settings, COMPILE=True)
    assert refused.codes == ["config.unpaired-compile"] and 'SWEEP="COMPILE=n,y"' in str(refused)
    if not sweep:
        build = configure(**settings, COMPILE=True)
        assert error_of(plan_cases, config_layers(build), build_dir=build).codes == refused.codes
    fast = planned(sweep=sweep, **settings, COMPILE=True, RUN_PROFILE_MAXOUT_SPEED=True)
    assert all(run.config.machine.compile for run in fast.runs)
