"""What make plan states about a study before it is trained: effect, seeds that it needs, cost, pilot."""

import json
import math
import statistics
from functools import partial

import pytest

from gpt2.study import view
from gpt2.study.power import confirm_power, detectable, pilot_factor, power_text, study_power
from lib.files import write_json
from lib.report.statistics import VerdictRule
from lib.runs.run_dir import RunDir
from tests.errors import error_of
from tests.lib.fabricated import complete


@pytest.fixture
def planned(planned):
    """The study of 19 steps with 5 seeds, compared with the baseline: 18 comparisons."""
    study = {"RA_MLA_ABLATION_MODE": True, "VERDICT_AGAINST_BASELINE": True}
    return partial(planned, seeds="1-5", **study)


def finish(plan, losses, slug="baseline"):
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
    # 18 steps, the baseline and the A/A step, 5 seeds, 12 hours each.
    power = study_power(plan, [12 * 3600.0] * len(plan.runs))
    assert (power["seeds"], power["comparisons"], power["needs"]) == (5, 18, {})
    assert power["alpha"] == pytest.approx(0.9 * 0.05)
    assert power["noise"]["sd"] == pytest.approx(0.0013 * math.sqrt(2))
    assert power["effect"] == pytest.approx(2.40 * 0.0013 * math.sqrt(2), rel=0.005)
    assert (power["runs"], power["device_hours"]) == (100, 1200)
    text = power_text(power)
    assert "notices 0.0044 nats" in text and "1,200.0 device hours" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    views = view.look(plan)
    assert "18 comparisons: notices" in view.plan_text(plan, views)
    record = json.loads(view.to_json(plan, views))
    assert record["power"]["seeds"] == 5 and 0 < record["power"]["device_hours"] < 1200


def test_a_declared_size_states_the_seeds_that_it_needs(planned):
    sizes = {"VERDICT_EFFECT": "0.005", "VERDICT_BAND": "0.005"}
    wide = study_power(planned(VERDICT_NOISE="0.0013", **sizes))
    assert wide["needs"] == {"VERDICT_EFFECT": 5, "VERDICT_BAND": 5}
    assert "VERDICT_EFFECT=0.005 needs 5 seeds\n" in power_text(wide)
    narrow = study_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.002"))["needs"]
    assert 16 <= narrow["VERDICT_BAND"] <= 20
    none = study_power(planned(VERDICT_NOISE="0.0013", VERDICT_EFFECT="0.0005"))
    assert none["needs"] == {"VERDICT_EFFECT": None} and "more than 60 seeds" in power_text(none)


def test_finished_baseline_seeds_are_a_pilot_and_finished_comparisons_the_best_estimate(planned):
    """The runs of SEEDS=1-5 STEPS=0 are the baseline of the study."""
    pilot, study = planned(steps="0"), planned(VERDICT_NOISE="0.5")
    baseline = [run.path for run in study.runs if not run.variant.parent]
    assert [run.path for run in pilot.runs] == baseline
    losses = [3.301, 3.299, 3.3005, 3.3021]
    finish(pilot, losses)
    noise = study_power(study)["noise"]
    expected = statistics.stdev(losses) * math.sqrt(2) * pilot_factor(4)
    assert noise["sd"] == pytest.approx(expected) and "4 baseline seeds" in noise["source"]
    gaps = {"golden": [0.003, -0.003, 0.0], "ra": [0.004, 0.0, -0.004, 0.0]}
    for slug, differences in gaps.items():
        finish(study, [b + d for b, d in zip(losses, differences, strict=False)], slug)
    # Two seeds say nothing, and a run that has learned nothing is no noise.
    finish(study, [3.2, 3.9], "mla")
    finish(study, [3.2, 3.3, 9.0], "full")
    noise = study_power(study)["noise"]
    variances = [statistics.variance(each) for each in gaps.values()]
    assert noise["sd"] == pytest.approx(math.sqrt(sum(variances) / 2))
    assert "2 comparisons" in noise["source"]


def test_without_any_noise_the_plan_names_what_to_do(planned):
    power = study_power(planned(VERDICT_EFFECT="0.003"))
    assert power["noise"] is power["effect"] is None and power["needs"] == {}
    text = power_text(power)
    assert "STEPS=0" in text and "VERDICT_NOISE" in text and "cost unknown" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    # A study without verdicts has no power.
    assert study_power(planned(seeds="1")) is None and power_text(None) == ""


@pytest.mark.slow
def test_an_effect_that_would_be_missed_is_a_question(planned, monkeypatch, capsys):
    settings = {"VERDICT_NOISE": "0.0013", "VERDICT_EFFECT": "0.003"}
    plan = planned(**settings)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert error_of(confirm_power, plan, yes=False).codes == ["usage.no-terminal"]
    confirm_power(plan, yes=True)
    # A size that 5 seeds notice, and an unknown noise.
    for enough in ({"VERDICT_EFFECT": "0.006", "VERDICT_BAND": "0.005"}, {"VERDICT_NOISE": "0"}):
        confirm_power(planned(**settings | enough), yes=False)
    assert not capsys.readouterr().err
    # A band is a note, and no question.
    confirm_power(planned(VERDICT_NOISE="0.0013", VERDICT_BAND="0.002"), yes=False)
    (note,) = capsys.readouterr().err.splitlines()
    assert "VERDICT_BAND=0.002 needs 17 seeds, 5 planned" in note
    # Nothing is asked if nothing is left to train.
    part = planned(**settings, steps="0")
    finish(part, [3.3, 3.31, 3.32, 3.33, 3.34])
    confirm_power(part, yes=False)


MATRIX = {"RA_MLA_ABLATION_MODE": None, "VERDICT_AGAINST_BASELINE": None}
MATRIX |= {"TEST_MATRIX_MODE": True, "ABLATION_DESIGN_FACTORIAL": True}
MATRIX |= {"ABLATION_FEATURES": "RECIPROCAL RA_CROSS_TOKEN MLP_ATTN_GATE"}


def test_an_effect_of_a_design_uses_all_of_its_runs(planned):
    """Three factors in eight runs: an effect has a quarter of the variance of a difference of two."""
    plan = planned(**MATRIX, VERDICT_NOISE="0.0013")
    power = study_power(plan)
    assert (len(plan.runs), power["comparisons"]) == (40, 6)
    sd = power["noise"]["sd"]
    assert sd == pytest.approx(0.0013 * 2 / math.sqrt(8))
    assert power["effect"] == pytest.approx(sd * detectable(5, 6, FACTORIAL, 0.045, 6))
    assert "noise of an effect" in power_text(power)
    # STEPS= selects steps of a study.
    assert "STEPS" not in power_text({**power, "noise": None})
    assert power_text({**power, "comparisons": 1}).startswith("5 seeds, 1 comparison: ")
    # The points of a sweep are compared with the first one.
    power = study_power(planned(sweep="LEARNING_RATE=1e-4,2e-4,3e-4", VERDICT_NOISE="0.0013"))
    assert power["comparisons"] == 2 and power["effect"] > 0


# The values of simulations of the whole rule, and of exact theory.

SHARED, OWN, FACTORIAL = (VerdictRule(variance) for variance in ("shared", "own", "factorial"))
# Seeds: smallest effect for one comparison, 18 own, 18 shared, 35 shared; band of 18, shared.
TABLE = {
    3: (3.26, 13.9, 4.14, 4.60, 3.97),
    5: (1.68, 3.67, 2.36, 2.54, 2.38),
    8: (1.16, 2.00, 1.65, 1.75, 1.71),
    12: (0.89, 1.39, 1.26, 1.34, 1.32),
    20: (0.66, 0.97, 0.93, 0.99, 0.98),
}


@pytest.mark.parametrize("n", TABLE)
def test_the_smallest_effect_and_band(n):
    found = [
        *(detectable(n, 1, rule, 0.05, 1) for rule in (SHARED, OWN)),
        *(detectable(n, m, rule, 0.05, m) for rule, m in ((OWN, 18), (SHARED, 18), (SHARED, 35))),
        detectable(n, 18, SHARED, 0.05, 18, is_band=True),
    ]
    # The table has two or three digits.
    assert found == pytest.approx([TABLE[n][0], *TABLE[n]], rel=0.022, abs=0.005)
    # Further comparisons, such as earlier ones, are corrected for and add no variance.
    assert detectable(n, 30, FACTORIAL, 0.05, 15) > detectable(n, 15, FACTORIAL, 0.05, 15)
    assert detectable(n, 18, VerdictRule(power=0.95), 0.05, 18) > found[3]


@pytest.mark.parametrize("k, factor", [(3, 2.12), (4, 1.73), (5, 1.56), (8, 1.35), (20, 1.18)])
def test_the_upper_limit_of_a_pilot(k, factor):
    assert pilot_factor(k) == pytest.approx(factor, rel=0.007)
