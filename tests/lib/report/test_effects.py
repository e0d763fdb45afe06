"""Effects of factorial designs: weights, missing cells, and their verdicts."""

import itertools
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from lib.report.columns import to_markdown, verdicts_to_terminal
from lib.report.contrasts import design_effects, scale_of
from lib.report.declarations import VerdictPlan, read_declarations
from lib.report.judge import declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.report.verdicts import SeedOutcome, VerdictWord
from lib.runs.run import RunVariant
from tests.lib.report.documents import document_of
from tests.lib.report.web_page import page_of

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord


def full_design(factors):
    return list(itertools.product((False, True), repeat=factors))


def variants(cells):
    return [
        RunVariant(
            "r" + "".join(str(int(on)) for on in cell),
            levels={name: "on" if on else "off" for name, on in zip("PQRSTUVWXY", cell)},
        )
        for cell in cells
    ]


def test_effects_are_named_by_letters_without_i():
    assert design_effects([RunVariant("a"), RunVariant("b")], True) is None
    assert design_effects([], True) is design_effects(variants(full_design(2)), None) is None
    cells = [tuple(i == on for i in range(10)) for on in range(-1, 10)]
    effects = design_effects(variants(cells), True)
    assert [c.name for c in effects.contrasts][7:] == ["H W", "J X", "K Y"]
    assert len(effects.not_estimable) == 45 and {"AB", "JK"} < effects.not_estimable.keys()


def paired(losses, member):
    """Return the effect of the factors ``member`` by its definition; None without a group."""
    differences = []
    for cell in (cell for cell in losses if not any(cell[i] for i in member)):
        parts = []
        for chosen in itertools.product((False, True), repeat=len(member)):
            on = dict(zip(member, chosen, strict=True))
            loss = losses.get(tuple(on.get(i, level) for i, level in enumerate(cell)))
            parts.append(None if loss is None else loss * (-1) ** chosen.count(False))
        if None not in parts:
            differences.append(sum(parts) / len(member))
    return statistics.fmean(differences) if differences else None


@pytest.mark.parametrize("interactions", [True, False])
@pytest.mark.parametrize("factors", [3, 4])
def test_an_effect_is_the_mean_over_the_pairs_that_exist(factors, interactions):
    draw, full, seen = random.Random(4), full_design(factors), set()
    members = [(i,) for i in range(factors)]
    members += itertools.combinations(range(factors), 2) if interactions else []
    for _ in range(20):
        cells = draw.sample(full, draw.randint(2, len(full)))
        losses = {cell: draw.gauss(3, 1) for cell in cells}
        effects = design_effects(variants(cells), interactions)
        by_letters = {c.name.split(" ")[0]: c for c in effects.contrasts}
        missing = {name.split(" ")[0] for name in effects.not_estimable}
        for member in members:
            letters, expected = "".join("ABCD"[i] for i in member), paired(losses, member)
            assert (letters in missing) is (expected is None) is (letters not in by_letters)
            if expected is not None:
                weights = by_letters[letters].weights
                slugs = dict(zip(cells, variants(cells), strict=True))
                total = sum(weights.get(slugs[cell].slug, 0.0) * losses[cell] for cell in cells)
                assert total == pytest.approx(expected, abs=1e-12)
        for contrast in effects.contrasts:
            growth = scale_of(contrast.weights) * len(full) / 4
            assert effects.inflated.get(contrast.name, 1.0) == pytest.approx(growth, abs=5e-3)
        seen |= {bool(missing), bool(effects.inflated)}
    assert seen == {True, False}


PLAN = VerdictPlan(VerdictRule("factorial"), interactions=True)


@pytest.fixture
def factorial(make_run):
    """Return a factory of a study of two features, of which P is 0.4 nats better."""

    def make(seeds=3, noise=0.004, missing=(), noisy=""):
        draw, runs = random.Random(2), []
        for seed, cell in itertools.product(range(1, seeds + 1), full_design(3)):
            (variant,) = variants([cell])
            scale = 0.2 if variant.slug == noisy else noise
            loss = 3 + seed / 8 - 0.4 * cell[0] + draw.gauss(0, scale)
            if cell not in missing:
                runs.append(make_run(variant.slug, loss, seed=seed, levels=variant.levels))
        return runs

    return make


def words(table):
    return {verdict["name"]: verdict["verdict"] for verdict in table.judged["verdicts"]}


def test_effects_have_words_and_a_row_each(factorial):
    table = read_study("demo", factorial(), plan=PLAN)
    expected = dict.fromkeys(["B Q", "C R", "AB", "AC", "BC"], INCONCLUSIVE) | {"A P": BETTER}
    assert words(table) == expected and table.judged["planned"] == 6
    # One variance of (n - 1) * 6 / 2 degrees of freedom.
    verdicts = table.judged["verdicts"]
    widths = {round(v["interval_95"][1] - v["interval_95"][0], 12) for v in verdicts}
    assert {v["degrees_of_freedom"] for v in verdicts} == {6.0} and len(widths) == 1
    document = document_of(table)
    text = to_markdown(document)
    (row,) = (line for line in text.splitlines() if line.startswith("| A P "))
    assert "BETTER" in row and "-0.40" in row and document["not_estimable"] == {}
    assert "variance rule factorial" in " ".join(text.split())
    # A noisy run stops the words.
    table = read_study("demo", factorial(noisy="r110"), plan=PLAN)
    assert set(words(table).values()) == {INCONCLUSIVE}
    for verdict in table.judged["verdicts"]:
        assert any(remark.startswith("SPREAD: r110") for remark in verdict["remarks"])


def test_effects_that_do_not_follow_are_listed_with_their_reason(factorial):
    missing = [cell for cell in full_design(3) if cell[1] and not cell[0]]
    table = read_study("demo", factorial(missing=missing), plan=PLAN)
    assert set(words(table)) == {"A P", "B Q", "C R", "AC", "BC"}
    because = "EFFECT  AB: not estimable, because 2 of 8 cells cannot be configured"
    for text in (to_markdown(document_of(table)), verdicts_to_terminal(document_of(table))):
        assert because in text
        assert "EFFECT  variance x 2.00 because of missing cells: A P, B Q" in text
    # On the page, effects have no reference, and runs no verdict.
    page = page_of(table)
    assert ">against<" not in page and "Δ baseline<" not in page and because in page


def test_runs_that_are_no_cells_are_judged_by_the_rule_shared(make_study):
    """Such as the points of a sweep, which replaces a configured factorial design."""
    steps = {"base": (3.125, 3.25, 3.375), "wide": (2.126, 2.252, 2.375)}
    runs = make_study({**steps, "deep": (3.127, 3.251, 3.375)})
    table = read_study("demo", runs, plan=PLAN)
    assert document_of(table)["not_estimable"] is None
    assert {verdict["variance"] for verdict in table.judged["verdicts"]} == {"shared"}


def outcomes_of(losses_RN, cells):
    return {
        variant.slug: [SeedOutcome(seed, float(loss)) for seed, loss in enumerate(losses)]
        for variant, losses in zip(variants(cells), losses_RN, strict=True)
    }


def test_a_cell_added_after_a_look_gives_its_effects_a_look_of_their_own(tmp_path):
    """Effects of other runs are other comparisons."""
    cells = sorted(full_design(3), key=lambda cell: cell == (False, True, False))
    rng = np.random.default_rng(4)
    signs = np.where(cells, 1.0, -1.0)
    mean_R = 10 - 0.5 * signs[:, 0] + 0.5 * signs[:, 0] * signs[:, 1]
    losses_RN = mean_R[:, None] + 0.05 * rng.standard_normal((8, 3))

    def report(count):
        effects = design_effects(variants(cells[:count]), True)
        rule = VerdictRule("factorial")
        declared, known = effects.contrasts, read_declarations(tmp_path)
        plan = VerdictPlan(rule, interactions=True, looks=LookPlan.fixed(3), declared=declared)
        plan = replace(plan, declarations=known, folder=tmp_path)
        outcomes = outcomes_of(losses_RN[:count], cells[:count])
        study = judge(effects.contrasts, outcomes, declare(plan, effects.contrasts, outcomes))
        return study, {v["name"]: v for v in study["verdicts"]}

    _, first = report(7)
    assert first["AB"]["verdict"] is WORSE and first["BC"]["verdict"] is INCONCLUSIVE
    study, whole = report(8)
    assert all((len(v["values"]), v["look"]) == (8, 2) for v in whole.values())
    assert [(look.n, look.share) for look in study["looks"]] == [(3, 0.9), (3, 0.05)]
    assert study["planned"] == 12 and whole["BC"]["planned_comparisons"] == 6


def judged(losses_RN, cells, rule):
    effects = design_effects(variants(cells), True)
    outcomes = outcomes_of(losses_RN, cells)
    plan = VerdictPlan(rule, interactions=True)
    return judge(effects.contrasts, outcomes, plan)["verdicts"]


def needs(cell):
    """Return whether a cell can be configured if the second feature needs the first."""
    return cell[0] or not cell[1]


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("noise", ["equal", "4 of 16 x3", "A x3", "one x10", "missing"])
def test_false_words_of_a_factorial_design(noise, n):
    """Planted effects are unbiased, and the others get at most 5 % false words per study."""
    cells, rng, studies = full_design(4), np.random.default_rng(n), 2000
    if noise == "missing":
        cells = [cell for cell in cells if needs(cell)]
    signs = np.where(cells, 1.0, -1.0)
    planted = {"A P": -2.0, "C R": -0.8, "AC": 1.0}
    mean_R = signs[:, 0] * -1.0 + signs[:, 2] * -0.4 + signs[:, 0] * signs[:, 2] * 0.5
    scale_R = np.full(len(cells), 0.71)
    if noise == "4 of 16 x3":
        scale_R[[1, 6, 11, 12]] *= 3
    elif noise == "A x3":
        scale_R[signs[:, 0] > 0] *= 3
    elif noise == "one x10":
        scale_R[5] *= 10
    estimates, false = [], 0
    for _ in range(studies):
        losses = 10 + mean_R[:, None] + scale_R[:, None] * rng.standard_normal((len(cells), n))
        verdicts = judged(losses, cells, VerdictRule("factorial"))
        estimates.append([verdict["difference"] for verdict in verdicts])
        names = [v["name"] for v in verdicts]
        false += any(v["verdict"] in (BETTER, WORSE) for v in verdicts if v["name"] not in planted)
    means = dict(zip(cells, mean_R, strict=True))
    members = ["ABCD".index(letter) for letter in "ABCD"]
    groups = [(i,) for i in members] + list(itertools.combinations(members, 2))
    truth = np.array([e for member in groups if (e := paired(means, member)) is not None])
    assert noise == "missing" or truth == pytest.approx([planted.get(name, 0.0) for name in names])
    error = np.std(estimates, axis=0) / np.sqrt(studies)
    # Ten effects: three standard errors each would fail in 3 % of correct programs.
    assert (np.abs(np.mean(estimates, axis=0) - truth) < 3.5 * error).all()
    print(f"{noise} n={n}: false words {100 * false / studies:.1f} %")
    assert false / studies <= 0.05
