"""Error rates if steps arrive one after another, and a false word after any of them counts."""

import numpy as np
import pytest

from lib.report.contrasts import Contrast
from lib.report.declarations import VerdictPlan
from lib.report.judge import declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.verdicts import SeedOutcome, VerdictWord
from tests.lib.report.simulated import NOISE, STEPS, Words, arrivals, differences

STUDIES = 10_000
SEEDS = (3, 5, 8)
ORDERS = ("random", "forward", "reverse")
FAMILY = [Contrast.pair(f"a{i}", "a0") for i in range(1, STEPS + 1)]


def percent(condition_S) -> float:
    return 100 * float(np.mean(condition_S))


def words_in_parts(losses_AN, arrives_C, variance):
    """Return the words of the product after each arrival, at one look that spends all of alpha."""
    n = losses_AN.shape[1]
    looks = LookPlan((n,), (1.0,))
    plan = VerdictPlan(VerdictRule(variance), looks=looks, declared=FAMILY)
    for stage in range(STEPS):
        arms = [0, *(i + 1 for i in range(STEPS) if arrives_C[i] <= stage)]
        runs = {
            f"a{i}": [SeedOutcome(s, float(y)) for s, y in enumerate(losses_AN[i])] for i in arms
        }
        plan = declare(plan, FAMILY, runs)
        study = judge(FAMILY, runs, plan)
        assert len(study["looks"]) == 1
        yield [v["verdict"] in (VerdictWord.BETTER, VerdictWord.WORSE) for v in study["verdicts"]]


@pytest.mark.parametrize("variance", ["shared", "own"])
@pytest.mark.parametrize("name", ["lognormal 1", "14 real, 4 x3", "6 dead"])
def test_the_arrays_give_the_same_words_as_the_product(name, variance):
    """The error rates below are those of the product."""
    draw, real = NOISE[name]
    rng = np.random.default_rng(5)
    losses_SAN = draw(rng, 2, 5)
    d_SCN, _ = differences(losses_SAN, real, chain=False)
    arrives_SC = arrivals(rng, 2, "random", chain=False)
    seen = 0
    for study, losses_AN in enumerate(losses_SAN):
        for stage, words in enumerate(words_in_parts(losses_AN, arrives_SC[study], variance)):
            one = slice(study, study + 1)
            arrived = arrives_SC[one] <= stage
            arrays = Words(d_SCN[one], variance, arrived_SC=arrived).differs[0]
            assert list(arrays) == words
            seen += sum(words)
    assert seen or name != "14 real, 4 x3"


def false_in_parts(name, n, order, variance="shared", chain=False, studies=STUDIES):
    """Return the percentages of studies with a false word after any arrival, and after the last."""
    draw, real = NOISE[name]
    rng = np.random.default_rng(100 + n)
    d_SCN, null_C = differences(draw(rng, studies, n), real, chain)
    arrives_SC = arrivals(rng, studies, order, chain)
    any_S = np.zeros(studies, bool)
    for stage in range(STEPS):
        words = Words(d_SCN, variance, arrived_SC=arrives_SC <= stage)
        last_S = words.differs[:, null_C].any(axis=1)
        any_S |= last_S
    return percent(any_S), percent(last_S)


@pytest.mark.parametrize("order", ORDERS)
def test_words_of_parts_keep_the_promise_in_1000_studies(order):
    after_any, after_last = false_in_parts("half the steps x3", 5, order, studies=1000)
    assert after_last <= after_any <= 5.0


@pytest.mark.long
@pytest.mark.parametrize("chain", [False, True], ids=["m18", "m35"])
@pytest.mark.parametrize("variance, limit", [("shared", 5.0), ("own", 5.6)])
@pytest.mark.parametrize("name", NOISE)
def test_false_words_in_any_order_of_arrival(name, variance, limit, chain):
    for n in SEEDS:
        for order in ORDERS:
            assert false_in_parts(name, n, order, variance, chain)[0] <= limit


@pytest.mark.long
def test_without_the_factor_the_promise_is_broken(monkeypatch):
    """The test above can fail: the words of each part as if it were the whole."""
    monkeypatch.setattr("tests.lib.report.simulated.PART_FACTOR", 1)
    assert false_in_parts("half the steps x3", 8, "forward")[0] > 6
