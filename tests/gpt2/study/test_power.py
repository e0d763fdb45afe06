"""What make plan states about a study before it is trained: smallest effect, band, cost, pilot."""

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpt2.study import view
from gpt2.study.plan import Plan, Sweep, config_layers, make_plan
from gpt2.study.power import (
    _misses,
    band_probability,
    confirm_power,
    detectable_effect,
    fillable_band,
    pilot_factor,
    power_text,
    seeds_for,
    study_cost,
    study_power,
)
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.errors import ConfigError
from lib.files import write_json
from lib.project import ROOT
from lib.report.statistics import VerdictRule
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.lib.fabricated import complete


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """The study of 19 steps at 124M with 5 seeds, compared with the baseline: 18 comparisons."""

    def plan(seeds: str = "1-5", steps: str = "", sweep: str = "", **settings: SymbolValue) -> Plan:
        against: dict[str, SymbolValue] = {"VERDICT_AGAINST_BASELINE": True}
        layers = defconfig_layers(ROOT, "gpt2-ratio-ablation")
        write_build(tmp_path, {**against, **settings}, *layers)
        axes = Sweep(sweep) if sweep else None
        return make_plan(config_layers(tmp_path), tmp_path, seeds=seeds, steps=steps, sweep=axes)

    return plan


def finish_baseline(plan: Plan, losses: list[float]) -> None:
    baseline = next(run.variant.slug for run in plan.runs if not run.variant.parent)
    finish(plan, baseline, losses)


def finish(plan: Plan, slug: str, losses: list[float]) -> None:
    runs = [run for run in plan.runs if run.variant.slug == slug]
    for run, loss in zip(runs, losses, strict=False):
        run.path.mkdir(parents=True)
        final = {"val_loss": loss, "unigram_entropy": 7.0, "parameters": 1, "tokens": 1}
        final |= {"iterations": 1, "sparsity": 0.0, "sparsity_by_layer": {}, "prunable_weights": {}}
        write_json(RunDir(run.path).summary, {"final": final})
        complete(RunDir(run.path))


def test_a_worked_example(planned):
    """sd of a run 0.0013, so 0.00184 of a difference; 2.40 of it at the alpha of the only look."""
    plan = planned(VERDICT_NOISE="0.0013")
    power = study_power(plan)
    assert (power["seeds"], power["comparisons"]) == (5, 18)
    assert power["alpha"] == pytest.approx(0.9 * 0.05)
    assert power["noise"]["sd"] == pytest.approx(0.0013 * math.sqrt(2))
    assert power["effect"] == pytest.approx(2.40 * 0.0013 * math.sqrt(2), rel=0.005)
    # 18 steps, the baseline twice and the A/A step, 5 seeds, 12 hours each.
    cost = study_cost(plan, [12 * 3600.0] * len(plan.runs))
    assert (cost["runs"], cost["gpu_hours"]) == (105, 1260)
    text = power_text(power, cost)
    assert "0.0044 nats" in text and "1,260.0 device hours" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert study_cost(plan, [None] * len(plan.runs))["gpu_hours"] is None


def test_the_band_states_the_seeds_that_it_needs(planned):
    assert study_power(planned(VERDICT_NOISE="0.0013"))["band_seeds"] is None
    wide = study_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.005"))
    narrow = study_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.002"))
    none = study_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.0005"))
    assert (
        wide["band_seeds"] == 5 and 16 <= narrow["band_seeds"] <= 20 and none["band_seeds"] is None
    )
    assert "more than 60 seeds" in power_text(none, study_cost(planned(), []))


def test_finished_baseline_seeds_are_a_pilot(planned):
    """The runs of SEEDS=1-5 STEPS=0 are the baseline of the study."""
    pilot, study = planned(steps="0"), planned(VERDICT_NOISE="0.5")
    baseline = [run.path for run in study.runs if not run.variant.parent]
    assert [run.path for run in pilot.runs] == baseline
    losses = [3.301, 3.299, 3.3005, 3.3021]
    finish_baseline(pilot, losses)
    noise = study_power(study)["noise"]
    expected = statistics.stdev(losses) * math.sqrt(2) * pilot_factor(4)
    assert noise["sd"] == pytest.approx(expected) and "4 baseline seeds" in noise["source"]


def test_finished_comparisons_are_the_best_estimate(planned):
    plan = planned()
    base = [3.301, 3.299, 3.3005, 3.3021]
    gaps = {"golden": [0.003, -0.003, 0.0], "ra": [0.004, 0.0, -0.004, 0.0]}
    finish_baseline(plan, base)
    for slug, differences in gaps.items():
        finish(plan, slug, [b + d for b, d in zip(base, differences, strict=False)])
    # Two seeds say nothing, and a run that has learned nothing is no noise.
    finish(plan, "mla", [3.2, 3.9])
    finish(plan, "full", [3.2, 3.3, 9.0])
    noise = study_power(plan)["noise"]
    variances = [statistics.variance(each) for each in gaps.values()]
    assert noise["sd"] == pytest.approx(math.sqrt(sum(variances) / 2))
    assert "2 comparisons" in noise["source"]


def test_without_any_noise_the_plan_names_what_to_do(planned):
    plan = planned()
    power = study_power(plan)
    assert power["noise"] is power["effect"] is None and not _misses(power)
    text = power_text(power, study_cost(plan, []))
    assert "STEPS=0" in text and "VERDICT_NOISE" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_study_without_verdicts_has_no_power(planned):
    assert study_power(planned(seeds="1")) is None
    assert power_text(None, study_cost(planned(seeds="1"), [])) == ""


@pytest.mark.slow
def test_an_effect_that_would_be_missed_is_a_question(planned, monkeypatch):
    settings = {"VERDICT_NOISE": "0.0013", "VERDICT_EFFECT": "0.003"}
    plan = planned(**settings)
    assert _misses(study_power(plan))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(ConfigError) as caught:
        confirm_power(plan, yes=False)
    assert caught.value.codes == ["usage.no-terminal"]
    confirm_power(plan, yes=True)
    confirm_power(planned(**settings | {"VERDICT_EFFECT": "0.006"}), yes=False)
    confirm_power(planned(VERDICT_EFFECT="0.003"), yes=False)
    # Nothing is asked if nothing is left to train.
    part = planned(**settings, steps="0")
    finish_baseline(part, [3.3, 3.31, 3.32, 3.33, 3.34])
    confirm_power(part, yes=False)


def test_a_band_that_hardly_any_step_can_fill_is_a_question(planned, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    narrow = planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.002")
    assert study_power(narrow)["band_probability"] < 0.05
    with pytest.raises(ConfigError) as caught:
        confirm_power(narrow, yes=False)
    assert caught.value.codes == ["usage.no-terminal"]
    confirm_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.004"), yes=False)


def test_an_effect_of_a_design_uses_all_of_its_runs(planned):
    """Three factors in eight runs: an effect has a quarter of the variance of a difference of two."""
    features = "RECIPROCAL RA_CROSS_TOKEN MLP_ATTN_GATE"
    matrix = {"TEST_MATRIX_MODE": True, "ABLATION_DESIGN_FACTORIAL": True}
    matrix |= {"ABLATION_FEATURES": features, "VERDICT_NOISE": "0.0013"}
    plan = planned(**matrix)
    power = study_power(plan)
    assert (len(plan.runs), power["comparisons"]) == (40, 6)
    assert power["noise"]["sd"] == pytest.approx(0.0013 * 2 / math.sqrt(8))
    factorial = VerdictRule("factorial")
    sd = power["noise"]["sd"]
    assert power["effect"] == pytest.approx(sd * detectable_effect(5, 6, factorial, 0.045))
    text = power_text(power, study_cost(plan, []))
    assert "noise of an effect" in text
    unknown = planned(**matrix | {"VERDICT_NOISE": "0"})
    # STEPS= selects steps of a study.
    assert "STEPS" not in power_text(study_power(unknown), study_cost(unknown, []))
    # Finished runs say the same about the noise of the effects.
    draw = random.Random(3)
    for run in plan.runs[::8]:
        for variant in plan.variants:
            finish_one = [r for r in plan.runs if r.seed == run.seed and r.variant == variant]
            finish(replace(plan, runs=finish_one), variant.slug, [3 + draw.gauss(0, 0.0013)])
    assert study_power(plan)["noise"]["sd"] == pytest.approx(sd, rel=0.35)
    assert "6 comparisons" in study_power(plan)["noise"]["source"]


def test_a_sweep_states_the_power_of_its_comparisons_with_the_first_point(planned):
    sweep = "LEARNING_RATE=1e-4,2e-4,3e-4,6e-4,1e-3"
    power = study_power(planned(sweep=sweep, VERDICT_NOISE="0.0013"))
    assert power["comparisons"] == 4 and power["effect"] > 0
    # Its combinations differ in more than their seeds.
    finished = planned(sweep=sweep)
    for run, loss in zip(finished.runs, [3.0, 3.1, 3.2, 3.3, 3.4, 3.5], strict=False):
        finish(replace(finished, runs=[run]), run.variant.slug, [loss])
    assert study_power(finished)["noise"] is None


def test_the_plan_and_its_record_have_it(planned):
    plan = planned(seeds="1-3", VERDICT_NOISE="0.0013")
    views = view.look(plan)
    assert "3 seeds, 18 comparisons: notices" in view.plan_text(plan, views)
    record = json.loads(view.to_json(plan, views))
    assert record["power"]["seeds"] == 3 and record["cost"]["runs"] == 63


# The values of simulations of the whole rule, and of exact theory.

SHARED, OWN, FACTORIAL = (VerdictRule(variance) for variance in ("shared", "own", "factorial"))
# Seeds: smallest effect for one comparison, 18 own, 18 shared, 35 shared; band shared, own.
TABLE = {
    3: (3.26, 13.9, 4.14, 4.60, 3.97, 10.3),
    4: (2.13, 5.74, 2.92, 3.14, 2.91, 4.9),
    5: (1.68, 3.67, 2.36, 2.54, 2.38, 3.4),
    6: (1.43, 2.79, 2.03, 2.18, 2.09, 2.7),
    8: (1.16, 2.00, 1.65, 1.75, 1.71, 2.0),
    10: (1.00, 1.62, 1.42, 1.51, 1.48, 1.6),
    12: (0.89, 1.39, 1.26, 1.34, 1.32, None),
    16: (0.75, 1.13, 1.07, 1.13, 1.11, None),
    20: (0.66, 0.97, 0.93, 0.99, 0.98, None),
    30: (0.53, 0.76, 0.75, 0.79, 0.78, None),
}


@pytest.mark.parametrize("n", TABLE)
def test_the_smallest_effect_and_band(n):
    one, own, shared, chain, band, own_band = TABLE[n]
    # The table has two or three digits.
    near = partial(pytest.approx, rel=0.01, abs=0.005)
    assert detectable_effect(n, 1, SHARED) == near(one) == detectable_effect(n, 1, OWN)
    assert detectable_effect(n, 18, OWN) == near(own)
    assert detectable_effect(n, 18, SHARED) == near(shared)
    # The factors were simulated with 18 comparisons, and for effects.
    assert detectable_effect(n, 35, SHARED) == pytest.approx(chain, rel=0.02)
    assert fillable_band(n, 18, SHARED) == pytest.approx(band, rel=0.02)
    if own_band is not None:
        assert fillable_band(n, 18, OWN) == pytest.approx(own_band, rel=0.025)


@pytest.mark.parametrize(
    "k, factor", [(3, 2.12), (4, 1.73), (5, 1.56), (8, 1.35), (10, 1.29), (20, 1.18)]
)
def test_the_upper_limit_of_a_pilot(k, factor):
    assert pilot_factor(k) == pytest.approx(factor, abs=0.0051)


def test_less_alpha_and_more_power_need_larger_effects():
    effect = detectable_effect(5, 18, SHARED)
    assert detectable_effect(5, 18, SHARED, 0.01) > effect
    assert detectable_effect(5, 18, VerdictRule(power=0.95)) > effect
    assert fillable_band(5, 18, SHARED, 0.01) > fillable_band(5, 18, SHARED)


def test_the_number_of_seeds_for_an_effect():
    needed = partial(detectable_effect, m=18, rule=SHARED)
    assert seeds_for(2.4, needed) == 5 and seeds_for(2.2, needed) == 6
    assert seeds_for(100, needed) == 3 and seeds_for(0.1, needed) is None


def test_further_comparisons_are_corrected_for_and_add_no_variance():
    """Such as earlier ones, in a design of fifteen effects."""
    assert detectable_effect(3, 30, FACTORIAL, variances=15) > detectable_effect(3, 15, FACTORIAL)


@pytest.mark.parametrize("rule, m", [(SHARED, 1), (SHARED, 18), (OWN, 18), (FACTORIAL, 15)])
def test_the_band_that_a_study_fills_has_the_power_of_the_rule(rule, m):
    for n in (5, 8):
        probability = band_probability(fillable_band(n, m, rule), n, m, rule, rule.alpha)
        assert probability == pytest.approx(0.8, abs=0.04 if m == 18 and rule is SHARED else 1e-3)
