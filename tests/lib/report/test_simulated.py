"""Error rates of the verdicts over many simulated studies."""

import math
import random

import numpy as np
import pytest

from lib.report.contrasts import Contrast
from lib.report.statistics import VerdictRule, outlier_limit
from lib.report.verdicts import SeedOutcome, VerdictWord, verdicts_at
from tests.lib.report.simulated import NOISE, STEPS, Words, differences

STUDIES = 10_000
SEEDS = (3, 5, 8)


def percent(condition_S) -> float:
    return 100 * float(np.mean(condition_S))


def judged(losses_AN, rule, planned=0):
    """Return the verdicts on one study from the product."""
    outcomes = {
        f"a{i}": [SeedOutcome(s, float(y)) for s, y in enumerate(losses)]
        for i, losses in enumerate(losses_AN)
    }
    return verdicts_at(
        [Contrast.pair(f"a{i}", "a0") for i in range(1, len(losses_AN))], outcomes, rule, planned
    )


@pytest.mark.parametrize("variance", ["shared", "own"])
@pytest.mark.parametrize("name", ["equal, r 0.5", "one step x10", "6 dead", "14 real, 4 x3"])
def test_the_arrays_give_the_same_words_as_the_product(name, variance):
    """The error rates below are those of the product."""
    draw, real = NOISE[name]
    rng, band = np.random.default_rng(5), 2.0
    seen = set()
    for n in (3, 5):
        losses_SAN = draw(rng, 8, n)
        d_SCN, _ = differences(losses_SAN, real, chain=False)
        arrays = Words(d_SCN, variance, band)
        for study, losses_AN in enumerate(losses_SAN):
            for step, verdict in enumerate(judged(losses_AN, VerdictRule(variance, band=band))):
                expected = (
                    (VerdictWord.EQUIVALENT,)
                    if arrays.equal[study, step]
                    else (
                        (VerdictWord.BETTER, VerdictWord.WORSE)
                        if arrays.differs[study, step]
                        else (VerdictWord.INCONCLUSIVE,)
                    )
                )
                if verdict["remarks"][-1:] != ["differs by rounding only"]:
                    assert verdict["verdict"] in expected
                    half = arrays.half_width[study, step]
                    low, high = verdict["interval_95"]
                    assert high - low == pytest.approx(2 * half, rel=1e-6)
                seen.add(verdict["verdict"])
    assert len(seen) > 1


@pytest.mark.long
@pytest.mark.parametrize("chain", [False, True], ids=["m18", "m35"])
@pytest.mark.parametrize("variance, limit", [("shared", 5.0), ("own", 5.6)])
@pytest.mark.parametrize("name", NOISE)
def test_false_wins(name, variance, limit, chain):
    draw, real = NOISE[name]
    for n in SEEDS:
        rng = np.random.default_rng(n)
        d_SCN, null_C = differences(draw(rng, STUDIES, n), real, chain)
        words = Words(d_SCN, variance)
        assert percent(words.differs[:, null_C].any(axis=1)) <= limit


@pytest.mark.long
@pytest.mark.parametrize("n", SEEDS)
def test_coverage_of_the_interval(n):
    for name in ("equal, r 0", "equal, r 0.9", "lognormal 1", "one step x7"):
        d_SCN, _ = differences(NOISE[name][0](np.random.default_rng(n), 2 * STUDIES, n), 0, False)
        words = Words(d_SCN)
        covered_C = 100 * np.mean(np.abs(words.mean) <= words.half_width, axis=0)
        assert 94.5 <= covered_C.mean() <= 95.5 and covered_C.min() >= 94.0


@pytest.mark.long
@pytest.mark.parametrize("n, effect, least", [(3, 4.0, 72), (5, 2.0, 57), (8, 1.5, 64)])
def test_power(n, effect, least):
    """A rule that never says BETTER fails here."""
    d_SCN, _ = differences(NOISE["equal, r 0"][0](np.random.default_rng(n), STUDIES, n), 0, False)
    d_SCN[:, 0] -= effect
    assert percent(Words(d_SCN).differs[:, 0]) >= least


@pytest.mark.long
@pytest.mark.parametrize("name", ["equal, r 0", "4 steps x3", "one step x7"])
@pytest.mark.parametrize("variance", ["shared", "own"])
def test_no_false_equivalence_at_the_band(name, variance):
    band = 4.0
    for n in SEEDS:
        rng = np.random.default_rng(n)
        d_SCN, _ = differences(NOISE[name][0](rng, STUDIES, n), 0, False)
        at_band = slice(STEPS // 2, STEPS)
        d_SCN[:, at_band] += band * rng.choice((-1, 1), (STUDIES, STEPS // 2, 1))
        words = Words(d_SCN, variance, band)
        assert percent(words.equal[:, at_band].any(axis=1)) <= 5.0 + 0.6 * (variance == "own")


@pytest.mark.long
def test_the_predicted_seeds_decide():
    rng = np.random.default_rng(11)
    rule, decided = VerdictRule(band=2.0), []
    open_words = (VerdictWord.INCONCLUSIVE,)
    for _ in range(250):
        effect_A = np.concatenate([[0], rng.uniform(-3, 3, STEPS)])[:, None]
        losses_AN = (effect_A + rng.standard_normal((STEPS + 1, 60)) / np.sqrt(2)) + 10.0
        n = int(rng.choice((3, 5)))
        first = judged(losses_AN[:, :n], rule)
        waiting = [i for i, v in enumerate(first) if v["verdict"] in open_words and v["more_seeds"]]
        if waiting:
            step = int(rng.choice(waiting))
            later = judged(losses_AN[:, : n + first[step]["more_seeds"]], rule)
            decided.append(later[step]["verdict"] not in open_words)
    assert len(decided) > 150 and 70 <= percent(decided) <= 100


def test_random_studies_have_no_word_without_an_effect():
    draw = random.Random(1)
    words = [
        verdict["verdict"]
        for _ in range(20)
        for verdict in judged(
            [[draw.gauss(3, 0.01) for _ in range(5)] for _ in range(6)], VerdictRule()
        )
    ]
    assert sum(word is not VerdictWord.INCONCLUSIVE for word in words) <= 3


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9, 11, 13, 15, 19, 23, 25, 40])
def test_one_percent_of_normal_steps_have_an_outlying_run(n):
    """The limits are quantiles of 400,000 samples; here are 50,000."""
    losses_SN = np.random.default_rng(n).standard_normal((50_000, n))
    distance_SN = np.abs(losses_SN - np.median(losses_SN, axis=1, keepdims=True))
    robust_S = distance_SN.max(axis=1) / (1.4826 * np.median(distance_SN, axis=1))
    limit = outlier_limit(n)
    assert np.mean(robust_S > limit) < 0.0115
    # A run farther away is one.
    assert limit < 19 and outlier_limit(4) == math.inf
    step = [*(3 + 0.001 * math.sin(i * i) for i in range(n - 1)), 9.0]
    (verdict,) = judged([[3 + 0.01 * math.cos(i * i) for i in range(n)], step], VerdictRule())
    assert [r for r in verdict["remarks"] if r.startswith("SPREAD: losses of a1")]
