"""Drift of the losses over a study, and the random order of runs that protects from it."""

import numpy as np
import pytest

from lib.report.contrasts import Contrast
from lib.report.declarations import VerdictPlan
from lib.report.drift import TimedValue, drift_test
from lib.report.study_verdicts import StudyVerdicts
from lib.report.text import verdict_lines
from lib.report.verdicts import SeedOutcome
from lib.runs.run import Run, RunVariant, training_order
from tests.lib.report.documents import document_of
from tests.lib.report.simulated import STEPS, Words

SEEDS = 5
RUNS = (STEPS + 1) * SEEDS


def times(study: int) -> np.ndarray:
    """Return when each run of a study starts, as arms by seeds, from the planned order."""
    runs = [
        Run(f"study{study}", RunVariant(f"a{arm}", number=arm), seed, None, None)
        for seed in range(SEEDS)
        for arm in range(STEPS + 1)
    ]
    start_AN = np.zeros((STEPS + 1, SEEDS))
    for time, run in enumerate(training_order(runs)):
        start_AN[run.variant.number, run.seed] = time
    return start_AN


def noise(rng, studies: int) -> np.ndarray:
    """Return losses SAN with standard deviation 1, of which seeds share half of the variance."""
    block = rng.standard_normal((studies, 1, SEEDS))
    own = rng.standard_normal((studies, STEPS + 1, SEEDS))
    return (block + own) / np.sqrt(2)


def drifting(losses_AN, start_AN, total: float) -> list[TimedValue]:
    return [
        TimedValue(f"a{arm}", seed, start, losses_AN[arm, seed] + total * start / (RUNS - 1))
        for (arm, seed), start in np.ndenumerate(start_AN)
    ]


def test_the_order_inside_a_block_removes_the_bias_of_a_drift():
    """The drift is 6 standard deviations of a run over the study."""
    studies = 1500
    drift_SAN = 6 * np.stack([times(study) for study in range(studies)]) / (RUNS - 1)
    bias_C = (drift_SAN[:, 1:] - drift_SAN[:, :1]).mean(axis=(0, 2))
    assert np.abs(bias_C).max() < 0.03
    losses_SAN = noise(np.random.default_rng(1), studies) + drift_SAN
    wins = Words(losses_SAN[:, 1:] - losses_SAN[:, :1]).differs.any(axis=1)
    assert wins.mean() <= 0.03


def test_one_step_after_the_other_a_drift_looks_like_an_effect():
    losses_SAN = noise(np.random.default_rng(1), 500)
    start_AN = np.arange(RUNS).reshape(STEPS + 1, SEEDS)
    losses_SAN += 3 * start_AN / (RUNS - 1)
    assert Words(losses_SAN[:, 1:] - losses_SAN[:, :1]).differs.any(axis=1).mean() > 0.9


@pytest.mark.parametrize("total, low, high", [(0, 0.0, 0.03), (3, 0.2, 0.42), (6, 0.88, 1.0)])
def test_a_drift_is_detected(total, low, high):
    losses_SAN = noise(np.random.default_rng(2), 200)
    tests = [drift_test(drifting(y, times(i), total)) for i, y in enumerate(losses_SAN)]
    assert low <= np.mean([test["alarms"] for test in tests]) <= high
    assert {(test["degrees"], test["runs"]) for test in tests} == {(STEPS * (SEEDS - 1) - 1, RUNS)}
    if total:
        assert np.mean([test["trend"] for test in tests]) == pytest.approx(total, abs=0.4)


def test_an_order_that_follows_from_steps_and_seeds_cannot_be_tested():
    losses_AN = noise(np.random.default_rng(3), 1)[0]
    start_AN = np.arange(RUNS).reshape(STEPS + 1, SEEDS)
    assert drift_test(drifting(losses_AN, start_AN, 6)) is None
    by_seed_AN = np.arange(RUNS).reshape(SEEDS, STEPS + 1).T
    assert drift_test(drifting(losses_AN, by_seed_AN, 6)) is None
    assert drift_test(drifting(losses_AN[:2, :2], times(0)[:2, :2], 0)) is None
    assert drift_test([]) is None


def test_missing_runs_leave_the_trend_of_the_others():
    start_AN = times(4)
    exact_AN = (
        10.0 * np.arange(STEPS + 1)[:, None]
        + np.arange(SEEDS)
        + 1e-3 * noise(np.random.default_rng(0), 1)[0]
    )
    runs = drifting(exact_AN, start_AN, 6)
    kept = [run for i, run in enumerate(runs) if i % 7]
    test = drift_test(kept)
    # The rank of a run is its place among those with a result.
    assert test["trend"] == pytest.approx(6, rel=0.05) and test["p"] < 1e-12
    assert test["degrees"] == len(kept) - (STEPS + 1) - SEEDS
    # Two groups without a common step or seed have one mean more.
    apart = [r for r in runs if (r.seed < 3) == (r.step in ("a1", "a2", "a3", "a4"))]
    assert drift_test(apart)["degrees"] == len(apart) - (STEPS + 1 + SEEDS - 2) - 1


def test_a_drift_is_a_remark_on_the_study():
    start_AN = times(0)
    losses_AN = noise(np.random.default_rng(5), 1)[0]
    shown = {}
    for total in (0, 20):
        losses = {(r.step, r.seed): r for r in drifting(losses_AN, start_AN, total)}
        outcomes = {
            f"a{arm}": [
                SeedOutcome(
                    s, losses[f"a{arm}", s].value, started_at=losses[f"a{arm}", s].started_at
                )
                for s in range(SEEDS)
            ]
            for arm in range(STEPS + 1)
        }
        contrasts = [Contrast.pair(f"a{i}", "a0") for i in range(1, STEPS + 1)]
        study = StudyVerdicts([("", contrasts, outcomes)], VerdictPlan())
        shown[total] = verdict_lines(document_of(study)), document_of(study)["drift"]
    assert "DRIFT" not in shown[0][0] and shown[0][1]["p"] > 0.01
    assert "DRIFT p<" in shown[20][0] and shown[20][1]["p"] < 1e-6


def test_the_speed_drifts_by_device():
    start_AN, rng = times(0), np.random.default_rng(6)

    def outcome(arm, seed, slower):
        start = start_AN[arm, seed]
        speed = 1000 * (1 + arm) * np.exp(0.01 * rng.standard_normal() - slower * start / RUNS)
        device = "fast" if arm % 2 else "slow"
        return SeedOutcome(
            seed, 3 + rng.standard_normal(), started_at=start, speed=speed, device=device
        )

    contrasts = [Contrast.pair(f"a{i}", "a0") for i in range(1, STEPS + 1)]
    shown = {}
    for slower in (0.0, 0.5):
        outcomes = {
            f"a{arm}": [outcome(arm, s, 0 if arm % 2 else slower) for s in range(SEEDS)]
            for arm in range(STEPS + 1)
        }
        study = StudyVerdicts([("", contrasts, outcomes)], VerdictPlan())
        shown[slower] = verdict_lines(document_of(study)).count("tokens/s")
        assert set(document_of(study)["speed_drifts"]) == {"fast", "slow"}
    assert shown == {0.0: 0, 0.5: 1}
    assert document_of(study)["speed_drifts"]["slow"]["trend"] == pytest.approx(-0.5, abs=0.1)
    assert not document_of(study)["speed_drifts"]["fast"]["alarms"]
