"""Verdicts against published values, and their behaviour on damaged, missing and extreme data."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from lib.report import statistics as engine
from lib.report.contrasts import Contrast
from lib.report.statistics import (
    VerdictRule,
    deviation_of,
    holm,
    sign_flip_p,
    smallest_p,
    t_isf,
    t_sf,
)
from lib.report.study import pairing_gain
from lib.report.verdicts import SeedOutcome, VerdictWord, verdicts_at
from tests.lib.report.documents import family_of
from tests.lib.report.test_columns import t_tail

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord
# Losses of the baseline; distinct, so that the seed has an effect.
BASE = (3.0, 3.25, 2.875, 3.125, 3.0625, 2.9375, 3.1875, 2.8125)
FOUR = (
    (-0.0104, -0.0088, -0.0101),
    (0.0005, -0.0011, 0.0009),
    (-0.0022, -0.0045, -0.0004),
    (-0.0008, 0.0004, -0.0012),
)


def runs(losses):
    return [SeedOutcome(seed, loss) for seed, loss in enumerate(losses, 1)]


def study(*differences, base=BASE):
    """Return the outcomes of a baseline and of one step per tuple of differences."""
    steps = {
        f"s{i}": runs([base[j] + d for j, d in enumerate(each)])
        for i, each in enumerate(differences, 1)
    }
    return {"base": runs(base[: len(differences[0])]), **steps}


def judged(outcomes, rule=VerdictRule(), planned=0):
    return verdicts_at(
        [Contrast.pair(s, "base") for s in outcomes if s != "base"], outcomes, rule, planned
    )


def figures(verdict):
    """Return the figures of the test of a verdict."""
    names = ("sd_of_rule", "degrees_of_freedom", "interval_95", "gated", "p", "p_adjusted")
    return [verdict[name] for name in (*names, "p_equivalent", "p_equivalent_adjusted")]


# Golden values.


def test_a_single_contrast_is_the_paired_t_test():
    (verdict,) = judged(study((-0.010, -0.012, -0.008, -0.011, -0.009)))
    assert verdict["difference"] == pytest.approx(-0.010, abs=1e-12)
    assert verdict["sd"] == pytest.approx(0.00158114, rel=1e-5)
    t = verdict["difference"] / (verdict["sd"] / math.sqrt(5))
    assert t == pytest.approx(-14.1421, rel=1e-5)
    assert verdict["p_own"] == pytest.approx(1.451281e-4, rel=1e-6)
    assert verdict["interval_95"] == pytest.approx((-0.0119632, -0.0080368), abs=5e-8)
    assert verdict["verdict"] is BETTER


def test_equivalence_is_two_one_sided_tests():
    (verdict,) = judged(study((0.001, -0.0005, 0.0012, -0.0008, 0.0003)), VerdictRule(band=0.005))
    assert verdict["p_equivalent"] == pytest.approx(1.369387e-4, rel=1e-6)
    assert verdict["verdict"] is EQUIVALENT


def test_four_contrasts_share_their_variance():
    first, second, third, fourth = judged(study(*FOUR), VerdictRule(band=0.005))
    assert [v["verdict"] for v in (first, second, third, fourth)] == [
        *(BETTER, EQUIVALENT, INCONCLUSIVE, EQUIVALENT)
    ]
    assert second["sd_of_rule"] ** 2 / 2 == pytest.approx(8.45e-7, rel=1e-4)
    assert second["degrees_of_freedom"] == 4
    assert first["p_adjusted"] == pytest.approx(8.051e-4, rel=1e-4)
    assert [v["p_adjusted"] for v in (second, third, fourth)] == [1, 1, 1]
    assert second["p_equivalent_adjusted"] == pytest.approx(0.00569, rel=1e-3)
    assert fourth["p_equivalent_adjusted"] == pytest.approx(0.00800, rel=1e-3)
    assert first["p_equivalent_adjusted"] == third["p_equivalent_adjusted"] == 1
    assert first["interval_95"] == pytest.approx((-0.011879, -0.007654), abs=1e-6)
    assert third["more_seeds"] == 5 and "about 5 more" in third["reason"]


def test_one_comparison_is_the_same_under_both_rules():
    outcomes = study([0.001 * (i * i - 3) for i in range(5)])
    (shared,), (own,) = (judged(outcomes, VerdictRule(r, band=0.02)) for r in ("shared", "own"))
    for name in ("p_adjusted", "p_equivalent"):
        assert shared[name] == pytest.approx(own[name], rel=1e-12)
    assert shared["p_adjusted"] == pytest.approx(shared["p_own"], rel=1e-12)
    assert shared["interval_95"] == own["interval_95"]


def test_student_t():
    """Published quantiles; closed forms of one and two degrees of freedom; the integral otherwise."""
    values = [t_isf(0.025 / 18, df) for df in (2, 4, 7)]
    assert values == pytest.approx([18.9341, 6.5697, 4.5062], abs=5e-5)
    for t in (0.1, 1.0, 30.0, 1000.0):
        assert t_sf(t, 1) == pytest.approx(math.atan(1 / t) / math.pi, rel=1e-12)
        root = math.sqrt(2 + t * t)
        assert t_sf(t, 2) == pytest.approx(1 / (root * (root + t)), rel=1e-12)
    for t, degrees in itertools.product((0.01, 0.5, 3.0, 14.0), (2.7, 10.8, 100)):
        assert t_sf(t, degrees) == pytest.approx(t_tail(t, degrees), rel=1e-6, abs=1e-12)
    for p in (0.7, 0.5, 0.3, 1e-3, 1e-6):
        assert t_sf(t_isf(p, 5.3), 5.3) == pytest.approx(p, rel=1e-12)


def test_holm_steps_down_from_the_smallest():
    assert holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.3, 0.01], 5) == pytest.approx([1.0, 0.05])


# The sign-flip test.


def test_p_of_the_sign_flips_is_the_count_of_all_patterns():
    draw = random.Random(2)
    drawn = [[draw.gauss(0.3, 1.0) for _ in range(n)] for n in range(2, 10) for _ in range(5)]
    # Ties, zeros and rounding count as extreme.
    for differences in [*drawn, [0.0] * 3, [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [1.0, -1.0]]:
        patterns = itertools.product((1, -1), repeat=len(differences))
        sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in patterns]
        count = sum(found >= abs(sum(differences)) - 1e-9 for found in sums)
        assert sign_flip_p(differences) == count / len(sums)
    assert sign_flip_p([-0.1 * (i + 1) for i in range(9)]) == smallest_p(9) == 2**-8
    # One seed, and too many patterns, have no p.
    assert [sign_flip_p([0.1] * n) for n in (0, 1, 21)] == [None] * 3


# Behaviour.


@pytest.mark.parametrize(("n", "least"), [(1, 3), (2, 3), (3, 4)])
def test_few_seeds_give_the_difference_and_no_word(n, least):
    (verdict,) = judged(study((-0.5, -0.3, -0.4)[:n]), VerdictRule(min_seeds=least))
    assert verdict["verdict"] is None and f"{n} seed" in verdict["reason"]
    assert verdict["difference"] == pytest.approx(-0.5 if n == 1 else -0.4)
    assert verdict["p"] is verdict["p_own"] is verdict["p_sign_flip"] is None
    assert verdict["interval_95"] is verdict["p_adjusted"] is None
    assert verdict["more_seeds"] == least - n


GOOD = study((-0.01, -0.012, -0.009))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ([*GOOD["s1"], GOOD["s1"][1]], "listed twice"),
        ([replace(run, loss=2.5) for run in GOOD["s1"]], "seed has no effect"),
        (GOOD["base"], "same model"),
        (GOOD["base"][:1], "same model"),
        ([replace(run, loss=run.loss - 0.25) for run in GOOD["base"]], "the same difference"),
    ],
)
def test_losses_that_cannot_be_separate_trainings_are_unfair(step, reason):
    (verdict,) = judged({"base": GOOD["base"][: len(step)], "s1": step})
    assert verdict["verdict"] is UNFAIR and reason in verdict["reason"]
    assert verdict["difference"] is verdict["p"] is None


def test_equal_means_over_different_items_are_not_the_same_model():
    items = [replace(run, items="other") for run in GOOD["base"]]
    (verdict,) = judged({"base": GOOD["base"], "s1": items}, VerdictRule(band=0.001))
    assert verdict["verdict"] is EQUIVALENT and "rounding" in verdict["remarks"][0]


def test_rounding_is_never_better_and_changes_no_other_verdict():
    rounding = (-1e-7, -1.1e-7, -0.9e-7)
    alone, among = judged(study(*FOUR), planned=5), judged(study(*FOUR, rounding))
    assert [*map(figures, alone)] == [*map(figures, among[:4])]
    assert among[4]["verdict"] is INCONCLUSIVE and among[4]["p"] is None
    for variance in ("shared", "own"):
        *_, last = judged(study(*FOUR, rounding), VerdictRule(variance, band=0.001))
        assert (last["verdict"], last["remarks"]) == (EQUIVALENT, ["differs by rounding only"])


def test_a_step_of_nearly_no_variance_does_not_lower_that_of_the_others():
    quiet = (-0.02, -0.0200001, -0.02)
    *among, last = judged(study(*FOUR, quiet))
    assert [*map(figures, among)] == [*map(figures, judged(study(*FOUR), planned=5))]
    assert last["sd_of_rule"] == last["sd"] and last["degrees_of_freedom"] == 2


def test_a_diverged_seed_leaves_no_number():
    outcomes = study((-0.01, -0.012, -0.009, -0.011, -0.01), (0.001, 0.002, 0.004, 0.001, 0.003))
    failed = SeedOutcome(2, None, diverged=True, reason="loss is nan")
    # A loss of a run that ended but did not learn does not count either.
    untrained = SeedOutcome(4, 9.75, diverged=True)
    step = [outcomes["s1"][i] for i in (0, 2, 4)] + [failed, untrained]
    first, second = judged({**outcomes, "s1": step})
    assert (first["verdict"], first["reason"]) == (DIVERGED, "2/5 (seeds 2, 4)")
    assert first["difference"] is first["p"] is first["sd"] is None and first["seeds"] == []
    assert first["remarks"] == ["over the other 3: -0.0097, not a verdict"]
    assert "9.75" not in json.dumps(first) and second["p"] is not None
    both = judged({**outcomes, "base": [*outcomes["base"][:4], replace(failed, seed=5)]})
    assert [(v["verdict"], v["reason"]) for v in both] == [(DIVERGED, "base, seed 5")] * 2


def test_a_missing_run_reduces_n_but_not_the_family():
    outcomes = study(*[(-0.01, -0.012, -0.009, -0.011)] * 1, (0.003, 0.001, 0.002, 0.004))
    lost = SeedOutcome(3, None, reason="out of memory")
    # Another seed takes no place: only one arm has it.
    step = [*outcomes["s1"][:2], lost, outcomes["s1"][3], SeedOutcome(9, 2.9)]
    first, second = judged({**outcomes, "s1": step})
    assert (first["n"], first["seeds"], second["n"]) == (3, [1, 2, 4], 4)
    assert first["planned_comparisons"] == second["planned_comparisons"] == 2
    assert first["excluded"] == ["s1 s3: out of memory", "base s9: not planned"]
    two = {name: step for name, step in outcomes.items() if name != "s2"}
    assert judged(two, planned=2)[0]["p_adjusted"] == pytest.approx(2 * judged(two)[0]["p_own"])


@pytest.mark.parametrize("variance", engine.VARIANCE_RULES)
def test_units_signs_and_order(variance):
    """Twice the losses and the band, another constant, exchanged arms, or reversed runs and arms."""
    rule = VerdictRule(variance, band=0.0078125)
    outcomes = study(*[[round(d * 2**16) / 2**16 for d in each] for each in FOUR])
    before = judged(outcomes, rule)
    pairs = [Contrast.pair(f"s{i}", "base") for i in range(1, 5)]

    def changed(change):
        return {s: [replace(r, loss=change(r.loss)) for r in rs] for s, rs in outcomes.items()}

    doubled = judged(changed(lambda loss: 2 * loss), replace(rule, band=2 * rule.band))
    shifted = judged(changed(lambda loss: loss + 4), rule)
    swapped = verdicts_at([Contrast.pair("base", pair.step) for pair in pairs], outcomes, rule)
    mirror = {BETTER: WORSE, WORSE: BETTER}
    for first, double, shift, swap in zip(before, doubled, shifted, swapped, strict=True):
        for name in ("verdict", "p_adjusted", "p_equivalent_adjusted"):
            assert double[name] == first[name]
        assert (shift["verdict"], figures(shift)) == (first["verdict"], figures(first))
        assert swap["verdict"] == mirror.get(first["verdict"], first["verdict"])
        assert swap["interval_95"] == [-end for end in reversed(first["interval_95"])]
    mixed = dict(reversed([(name, step[::-1]) for name, step in outcomes.items()]))
    assert json.dumps(verdicts_at(pairs, mixed, rule)) == json.dumps(before)


def test_no_word_contradicts_its_interval():
    draw, words = random.Random(7), []
    for i in range(120):
        n, k = draw.choice((3, 4, 6)), draw.choice((1, 4, 9))
        noise = [10 ** draw.uniform(-3, -1) for _ in range(k)]
        means = [draw.choice((0, 1, 5)) * sd * draw.choice((-1, 1)) for sd in noise]
        steps = [[draw.gauss(m, sd) for _ in range(n)] for m, sd in zip(means, noise)]
        for verdict in judged(study(*steps), VerdictRule(("shared", "own")[i % 2])):
            low, high = verdict["interval_95"]
            assert verdict["verdict"] is not BETTER or high < 0
            assert verdict["verdict"] is not WORSE or low > 0
            words.append(verdict["verdict"])
    assert {BETTER, WORSE, INCONCLUSIVE} <= set(words)


def test_no_number_overflows_or_is_nan():
    draw = random.Random(3)
    big = [1e300 * draw.gauss(1, 0.1) for _ in range(4)]
    tiny = [1e-300, -1e-300, 2e-300, 1e-300]
    close = [1e-3 * draw.gauss(1, 0.1) for _ in range(4)]
    outcomes = {"base": runs((0.0, 1e-310, 2e-310, 3e-310))}
    outcomes |= {f"s{i}": runs(losses) for i, losses in enumerate((big, tiny, close), 1)}
    for variance in engine.VARIANCE_RULES:
        for verdict in judged(outcomes, VerdictRule(variance, band=0.005)):
            json.dumps(verdict, allow_nan=False)
    exact = study([-1e6 - i * 1e-9 for i in range(8)], base=[float(i) for i in range(8)])
    (verdict,) = judged({**exact, "s1": [replace(r, loss=r.loss * 1.0) for r in exact["s1"]]})
    assert verdict["verdict"] in (BETTER, UNFAIR)


def test_the_family_of_a_study():
    chain = {"base": "", "a": "base", "b": "a", "c": "b"}
    pairs = [(c.name, c.role) for c in family_of(chain)]
    assert pairs == [
        ("a vs base", "baseline"),
        *(("b vs base", "baseline"), ("b vs a", "parent")),
        *(("c vs base", "baseline"), ("c vs b", "parent")),
    ]
    assert len(family_of(chain, "baseline")) == 3
    assert [c.reference for c in family_of(chain, "parent")] == ["base", "a", "b"]
    combinations = family_of({"x": "", "y": "", "z": ""})
    assert [c.name for c in combinations] == ["y vs x", "z vs x"] and family_of({}) == []


EIGHT = (-0.02, -0.021, -0.022, -0.02, -0.0215, -0.0205, -0.0212, -0.0201)


@pytest.mark.parametrize(
    ("n", "band", "planned", "word", "remarks"),
    [
        (8, 0.0, 0, BETTER, ["confirmed without the normal model"]),
        (8, 0.0, 20, BETTER, []),
        (
            *(4, 0.0, 0, BETTER),
            [
                "rests on the normal model: without it 4 seeds cannot give p below 0.125",
            ],
        ),
        (8, 0.05, 0, EQUIVALENT, ["real, but under the band"]),
        (8, 0.0212, 0, BETTER, ["under the band", "confirmed without the normal model"]),
    ],
)
def test_remarks_say_what_a_word_rests_on(n, band, planned, word, remarks):
    (verdict,) = judged(study(EIGHT[:n]), VerdictRule(band=band), planned)
    assert (verdict["verdict"], verdict["remarks"]) == (word, remarks)
    assert verdict["p_sign_flip"] == 2 / 2**n


def test_a_noisy_step_and_an_outlying_run_are_remarked():
    quiet = [[0.001 * ((i * j) % 5 - 2.2) for i in range(1, 6)] for j in range(1, 12)]
    wild = [0.0, 0.001, -0.001, 0.0005, 9.0]
    *_, last = judged(study(*quiet, wild))
    assert [r.split(":")[0] for r in last["remarks"]] == ["SPREAD"] * 2
    assert "losses of s12" in last["remarks"][1]
    assert "disagree" not in last["remarks"][0]
    *_, opposite = judged(study(*quiet, [-0.01, -0.011, -0.012, -0.009, 0.9]))
    assert "mean and median disagree" in opposite["remarks"][0]


def test_few_documents_limit_a_difference_of_many_seeds():
    """The differences of the documents are -0.04 to 0.02, those of the seeds all near -0.01."""
    shifts = (-0.04, 0.02, 0.0, -0.02)
    outcomes = study((-0.010, -0.012, -0.008, -0.011, -0.009), (0.01, -0.2, 0.1, 0.3, -0.1))
    for arm, moves in (("base", (0, 0, 0, 0)), ("s1", shifts), ("s2", shifts)):
        outcomes[arm] = [
            replace(run, documents=tuple(run.loss + i + move for i, move in enumerate(moves)))
            for run in outcomes[arm]
        ]
    small, noisy = judged(outcomes)
    error = deviation_of([shift - 0.01 for shift in shifts]) / 2
    assert small["document_error"] == pytest.approx(error) and error > small["sd"] / math.sqrt(5)
    limited = "limited by the evaluation set, not by seeds"
    assert limited in small["remarks"] and limited not in noisy["remarks"]
    # Another number of documents is another evaluation, and no documents are none.
    outcomes["s1"][0] = replace(outcomes["s1"][0], documents=(1.0,))
    assert [verdict["document_error"] is None for verdict in judged(outcomes)] == [True, False]


def test_pairing_is_reported_for_the_study():
    found = judged(study(*FOUR))
    paired = sum(deviation_of(each) ** 2 for each in FOUR)
    apart = sum(deviation_of(list(v)) ** 2 for f in found for v in f["values"].values())
    assert pairing_gain(found) == pytest.approx(1 - paired / apart, rel=1e-6)
    assert pairing_gain(judged(study((0.1,)))) is None


def test_the_other_rule_is_recorded_and_remarked():
    first, *_ = judged(study(*FOUR), planned=35)
    assert first["other_rule"]["variance"] == "own"
    assert first["other_rule"]["p_adjusted"] == pytest.approx(35 * first["p_own"])
    assert first["verdict"] is BETTER and "the rule own gives INCONCLUSIVE" in first["remarks"]
