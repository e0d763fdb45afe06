"""Error rates of a study that is judged at several looks, over many simulated studies."""

from functools import partial

import numpy as np
import pytest

from lib.report.contrasts import Contrast
from lib.report.declarations import Look, VerdictPlan, share_at
from lib.report.judge import declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import ErrorLevel, VerdictRule
from lib.report.verdicts import SeedOutcome, VerdictWord, verdicts_at
from tests.lib.report.simulated import NOISE, STEPS, at_looks, differences

STUDIES = 10_000
PLAN = LookPlan((3, 5, 8), (0.2, 0.3, 0.4))
PLANNED = [(3, 0.2), (5, 0.3), (8, 0.4)]
UNPLANNED = [(n, 0.05 / 2**k) for k, n in enumerate((9, 10, 12, 13, 16))]
FAMILY = [Contrast.pair(f"a{i}", "a0") for i in range(1, STEPS + 1)]
CODES = {VerdictWord.INCONCLUSIVE: 0, VerdictWord.EQUIVALENT: 2}


def percent(condition_S) -> float:
    return 100 * float(np.mean(condition_S))


def outcomes(losses_AN, n):
    return {
        f"a{i}": [SeedOutcome(s, float(y)) for s, y in enumerate(losses[:n])]
        for i, losses in enumerate(losses_AN)
    }


def judged_at_looks(losses_AN, rule):
    """Return word and look of each contrast from the product, after all looks."""
    plan = VerdictPlan(rule, looks=PLAN)
    for n, share in PLANNED + UNPLANNED:
        runs = outcomes(losses_AN, n)
        plan = declare(plan, FAMILY, runs)
        study = judge(FAMILY, runs, plan)
        if plan.taken is None:
            assert study["closed"][-1] == set(study["family"])
            break
        assert plan.taken.share == pytest.approx(share)
    words = np.array([CODES.get(verdict["verdict"], 1) for verdict in study["verdicts"]])
    looks = np.array([0 if v["look"] is None else v["look"] - 1 for v in study["verdicts"]])
    return words, np.where(words > 0, looks, 0)


@pytest.mark.parametrize("variance", ["shared", "own"])
@pytest.mark.parametrize("name", ["equal, r 0.5", "one step x10", "6 dead", "14 real, 4 x3"])
def test_the_arrays_give_the_same_words_as_the_looks_of_the_product(name, variance):
    """The error rates below are those of the product."""
    draw, real = NOISE[name]
    losses_SAN, band = draw(np.random.default_rng(7), 4, 16), 4.0
    d_SCN, _ = differences(losses_SAN, real, chain=False)
    word_SC, look_SC = at_looks(d_SCN, PLANNED + UNPLANNED, variance, band)
    # Differences by rounding only are EQUIVALENT without a test.
    tested_SC = np.abs(d_SCN).max(axis=2) >= 1e-5
    for study, losses_AN in enumerate(losses_SAN):
        words, looks = judged_at_looks(losses_AN, VerdictRule(variance, band=band))
        tested = tested_SC[study]
        assert (words == word_SC[study])[tested].all()
        assert (looks == look_SC[study])[tested].all()
    assert (word_SC > 0).any()


def false_words(name, variance, studies, chain=False):
    """Return the percentages of studies with a false word after the planned and after all looks."""
    draw, real = NOISE[name]
    losses_SAN = draw(np.random.default_rng(3), studies, UNPLANNED[-1][0])
    d_SCN, null_C = differences(losses_SAN, real, chain)
    word_SC, look_SC = at_looks(d_SCN, PLANNED + UNPLANNED, variance)
    false_SC = word_SC[:, null_C] == 1
    early_SC = false_SC & (look_SC[:, null_C] < len(PLANNED))
    return percent(early_SC.any(axis=1)), percent(false_SC.any(axis=1))


@pytest.mark.parametrize("name", ["equal, r 0.5", "one step x7"])
def test_planned_and_unplanned_looks_keep_the_promise_in_1000_studies(name):
    planned, all_looks = false_words(name, "shared", 1000)
    assert planned <= all_looks <= 5.0


@pytest.mark.long
@pytest.mark.parametrize("variance, limit", [("shared", 5.0), ("own", 5.6)])
@pytest.mark.parametrize("name", NOISE)
def test_false_words_at_looks(name, variance, limit):
    assert max(false_words(name, variance, STUDIES)) <= limit


@pytest.mark.long
@pytest.mark.parametrize("name", ["equal, r 0.5", "one step x10", "14 real, 4 x3"])
def test_false_words_at_looks_with_parents(name):
    assert max(false_words(name, "shared", STUDIES, chain=True)) <= 5.0


@pytest.mark.long
def test_looks_without_a_share_break_the_promise():
    """The tests above can fail: the same looks, each with all of alpha."""
    d_SCN, _ = differences(NOISE["equal, r 0.5"][0](np.random.default_rng(3), STUDIES, 8), 0, False)
    word_SC, _ = at_looks(d_SCN, [(n, 1.0) for n in range(3, 9)], "own")
    assert percent((word_SC == 1).any(axis=1)) > 10


def shares_of_lists(memory: bool) -> list[tuple[int, float]]:
    """Return the looks of the lists SEEDS=1-3, then 1-5, then 1-8, with or without declarations."""
    looks = []
    losses_AN = NOISE["equal, r 0.5"][0](np.random.default_rng(3), 1, 8)[0]
    known = VerdictPlan().declarations
    for n in (3, 5, 8):
        plan = VerdictPlan(looks=LookPlan.fixed(n), declarations=known)
        plan = declare(plan, FAMILY, outcomes(losses_AN, n))
        known = plan.declarations if memory else known
        looks.append((n, plan.taken.share))
    return looks


@pytest.mark.parametrize("memory, studies", [(True, 1000), (False, 1000)])
def test_three_lists_of_seeds_need_the_declarations(memory, studies):
    """Without them, a longer list would be judged as if it were the first."""
    d_SCN, _ = differences(NOISE["equal, r 0.5"][0](np.random.default_rng(3), studies, 8), 0, False)
    word_SC, _ = at_looks(d_SCN, shares_of_lists(memory), "own")
    rate = percent((word_SC == 1).any(axis=1))
    assert rate <= 5.6 if memory else rate > 9


@pytest.mark.long
def test_no_false_equivalence_at_the_band_at_looks():
    band = 4.0
    rng = np.random.default_rng(3)
    d_SCN, _ = differences(NOISE["4 steps x3"][0](rng, STUDIES, 16), 0, False)
    at_band = slice(STEPS // 2, STEPS)
    d_SCN[:, at_band] += band * rng.choice((-1, 1), (STUDIES, STEPS // 2, 1))
    for variance, limit in (("shared", 5.0), ("own", 5.6)):
        word_SC, _ = at_looks(d_SCN, PLANNED + UNPLANNED, variance, band)
        assert percent((word_SC[:, at_band] == 2).any(axis=1)) <= limit


@pytest.mark.long
def test_the_predicted_seeds_decide_at_their_look():
    rng = np.random.default_rng(11)
    rule, decided = VerdictRule(band=2.0), []
    after = partial(share_at, PLAN, [Look(1, 3, 0.2, True)])
    for _ in range(250):
        effect_A = np.concatenate([[0], rng.uniform(-3, 3, STEPS)])[:, None]
        losses_AN = 10.0 + effect_A + rng.standard_normal((STEPS + 1, 63)) / np.sqrt(2)
        level = ErrorLevel(0.2, share_at=after)
        first = verdicts_at(FAMILY, outcomes(losses_AN, 3), rule, STEPS, level)
        waiting = [
            i
            for i, v in enumerate(first)
            if v["verdict"] is VerdictWord.INCONCLUSIVE and v["more_seeds"]
        ]
        if waiting:
            step = int(rng.choice(waiting))
            n = 3 + first[step]["more_seeds"]
            level = ErrorLevel(after(n))
            later = verdicts_at(FAMILY, outcomes(losses_AN, n), rule, STEPS, level)
            decided.append(later[step]["verdict"] is not VerdictWord.INCONCLUSIVE)
    assert len(decided) > 150 and 70 <= percent(decided) <= 100
