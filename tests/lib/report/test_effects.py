"""Effects of factorial designs: weights, aliases, missing cells, and their verdicts."""

import itertools
import json
import random

import numpy as np
import pytest

from lib.plan.fractions import fraction, full_design
from lib.plan.run import RunVariant
from lib.report.contrast_tests import VerdictRule
from lib.report.contrasts import EFFECT, DesignOptions
from lib.report.looks import LookPlan, LookSchedule
from lib.report.report_page import ReportContext, report_page
from lib.report.study_verdicts import VerdictPlan, judge_study
from lib.report.table import build_table
from lib.report.table_text import table_to_json, table_to_markdown
from lib.report.verdict_record import with_record, write_verdicts
from lib.report.verdict_text import verdict_lines
from lib.report.verdicts import SeedOutcome, VerdictWord

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord
# Section 6 of the design: eight factors in 16 runs.
STRINGS = {
    "AB=CG=DH=EF",
    "AC=BG=DF=EH",
    "AD=BH=CF=EG",
    "AE=BF=CH=DG",
    "AF=BE=CD=GH",
    "AG=BC=DE=FH",
    "AH=BD=CE=FG",
}


def design_effects(variants, kind, **options):
    return DesignOptions(kind, **options).effects(variants)


def variants(cells, slug="r{}"):
    names = "PQRSTUVW"
    return [
        RunVariant(
            slug.format("".join(str(int(on)) for on in cell)),
            levels={name: "on" if on else "off" for name, on in zip(names, cell, strict=False)},
        )
        for cell in cells
    ]


def test_eight_factors_in_sixteen_runs_have_seven_strings():
    effects = design_effects(variants(fraction(8)), "fractional")
    names = [contrast.name for contrast in effects.contrasts]
    assert names[:8] == [f"{letter} {name}" for letter, name in zip("ABCDEFGH", "PQRSTUVW")]
    assert {"=".join(name.split("=")) for name in names[8:]} == STRINGS
    assert all(contrast.role == EFFECT for contrast in effects.contrasts)
    assert not effects.not_estimable and not effects.inflated


@pytest.mark.parametrize(
    ("cells", "design"),
    [(full_design(2), "factorial"), (full_design(4), "factorial"), (fraction(8), "fractional")],
)
def test_effects_of_a_complete_design_are_orthogonal(cells, design):
    effects = design_effects(variants(cells), design)
    slugs = [variant.slug for variant in variants(cells)]
    matrix = np.array([[c.weights[slug] for slug in slugs] for c in effects.contrasts])
    assert (matrix @ matrix.T == 4 / len(cells) * np.eye(len(matrix))).all()
    assert {contrast.scale for contrast in effects.contrasts} == {4 / len(cells)}
    main = dict(zip(slugs, cells, strict=True))
    weights = effects.contrasts[0].weights
    assert all((weights[slug] > 0) == main[slug][0] for slug in slugs)


def model(cells, interactions, strings):
    """Return the columns of intercept and effects, by the definition."""
    columns = [[1] * len(cells)]
    for name in strings:
        word = name.split(" ")[0].split("=")[0]
        members = ["ABCDEFGH".index(letter) for letter in word]
        columns.append([np.prod([1 if cell[i] else -1 for i in members]) for cell in cells])
    return np.array(columns, float).T


@pytest.mark.parametrize("interactions", [True, False])
@pytest.mark.parametrize(
    ("full", "design"),
    [(full_design(3), "factorial"), (full_design(4), "factorial"), (fraction(8), "fractional")],
)
def test_missing_cells_leave_exactly_the_row_space(full, design, interactions):
    draw = random.Random(4)
    whole = design_effects(variants(full), design, interactions=interactions)
    strings = [contrast.name for contrast in whole.contrasts]
    seen = set()
    for _ in range(40):
        cells = draw.sample(full, draw.randint(2, len(full)))
        effects = design_effects(variants(cells), design, interactions=interactions)
        x = model(cells, interactions, strings)
        inverse, rank = np.linalg.pinv(x), np.linalg.matrix_rank(x)
        outside = {
            name
            for j, name in enumerate(strings, 1)
            if np.linalg.matrix_rank(np.vstack([x, np.eye(x.shape[1])[j]])) > rank
        }
        assert set(effects.not_estimable) == outside
        for contrast in effects.contrasts:
            expected = 2 * inverse[1 + strings.index(contrast.name)]
            slugs = [variant.slug for variant in variants(cells)]
            weights = [contrast.weights.get(slug, 0.0) for slug in slugs]
            assert weights == pytest.approx(expected, abs=1e-12)
            growth = contrast.scale * len(full) / 4
            assert effects.inflated.get(contrast.name, 1.0) == pytest.approx(growth, abs=5e-3)
        seen |= {bool(outside), bool(effects.inflated)}
    assert seen == {True, False}


def test_one_missing_cell_of_sixteen_inflates_main_effects_by_a_seventh():
    effects = design_effects(variants(fraction(8)[:-1]), "fractional", interactions=False)
    assert list(effects.inflated.values()) == [pytest.approx(8 / 7)] * 8
    saturated = design_effects(variants(fraction(8)[:-1]), "fractional")
    assert not saturated.contrasts and len(saturated.not_estimable) == 15


def test_the_dependency_is_the_reason():
    needs = design_effects(
        variants([c for c in full_design(3) if c[0] or not c[1]]), "factorial"
    ).not_estimable
    assert needs == dict.fromkeys(["A P", "B Q", "AB"], "Q needs P")
    excludes = design_effects(
        variants([c for c in full_design(3) if not (c[0] and c[1])]), "factorial"
    ).not_estimable
    assert set(excludes.values()) == {"P excludes Q"} and "C R" not in excludes
    one = design_effects(variants(full_design(2)[:-1]), "factorial", interactions=False)
    assert not one.not_estimable and set(one.inflated) == {"A P", "B Q"}
    off = design_effects(variants([c for c in full_design(2) if not c[0]]), "factorial")
    assert off.not_estimable["A P"] == "P is never on"


def test_simple_effects():
    effects = design_effects(variants(full_design(3)), "factorial", simple_effects=True)
    others = {c.name: c.weights for c in effects.contrasts if c.role != EFFECT}
    assert others["r100 vs r000"] == {"r100": 1, "r000": -1}
    assert others["r011 vs r111"] == {"r011": 1, "r111": -1}
    assert others["A P in all vs alone"] == {"r111": 1, "r011": -1, "r100": -1, "r000": 1}
    assert len(others) == 9
    partly = design_effects(
        variants([c for c in full_design(3) if c[0] or not c[1]]), "factorial", simple_effects=True
    )
    assert partly.not_estimable["A P in all vs alone"] == "Q needs P"


def test_runs_that_are_no_cells_have_no_effects():
    assert design_effects([RunVariant("a"), RunVariant("b")], "factorial") is None
    assert design_effects([], "factorial") is None


PLAN = VerdictPlan(VerdictRule("factorial"), design=DesignOptions("factorial"))
PAGE = ReportContext("Matrix", [], {}, [], [])


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
    return {verdict.contrast.name: verdict.word for verdict in table.verdicts.verdicts}


def test_the_words_stand_beside_the_marginal_means(factorial):
    table = build_table("demo", factorial(), verdict_plan=PLAN)
    expected = dict.fromkeys(["B Q", "C R", "AB", "AC", "BC"], INCONCLUSIVE) | {"A P": BETTER}
    assert words(table) == expected and table.verdicts.planned == 6
    text = table_to_markdown(table)
    (row,) = (line for line in text.splitlines() if line.startswith("| P ") and "| on " in line)
    assert "BETTER" in row and "-0.40" in row
    assert "Rule: factorial" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith("| P "))
    assert json.loads(table_to_json(table))["verdicts"]["not_estimable"] == {}


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_give_no_word(factorial, seeds):
    table = build_table("demo", factorial(seeds), verdict_plan=PLAN)
    text = table_to_markdown(table) + verdict_lines(table.verdicts).replace("VERDICT", "")
    assert not any(word in text for word in VerdictWord)
    assert all(verdict.test is None for verdict in table.verdicts.verdicts)


def test_a_noisy_run_stops_the_words(factorial):
    table = build_table("demo", factorial(noisy="r110"), verdict_plan=PLAN)
    assert set(words(table).values()) == {INCONCLUSIVE}
    for verdict in table.verdicts.verdicts:
        assert any(remark.startswith("SPREAD: r110") for remark in verdict.remarks)
    assert set(words(build_table("demo", factorial(), verdict_plan=PLAN)).values()) != {
        INCONCLUSIVE
    }


def test_effects_that_do_not_follow_are_listed_with_their_reason(factorial):
    missing = [cell for cell in full_design(3) if cell[1] and not cell[0]]
    table = build_table("demo", factorial(missing=missing), verdict_plan=PLAN)
    assert set(words(table)) == {"C R", "AC", "BC"}
    text = table_to_markdown(table)
    assert "A P: not estimable, because Q needs P" in text and "| not estimable" in text
    assert "EFFECT  AB: not estimable, because Q needs P" in verdict_lines(table.verdicts)


def test_simple_effects_are_ordinary_comparisons_of_the_same_family(factorial):
    plan = VerdictPlan(
        VerdictRule("factorial"), design=DesignOptions("factorial", simple_effects=True)
    )
    table = build_table("demo", factorial(), verdict_plan=plan)
    assert table.verdicts.planned == 6 + 9
    by_name = {verdict.contrast.name: verdict for verdict in table.verdicts.verdicts}
    assert by_name["r100 vs r000"].rule.variance == "shared"
    assert by_name["A P"].rule.variance == "factorial"
    assert by_name["r100 vs r000"].word is BETTER and by_name["r011 vs r111"].word is WORSE


def outcomes_of(losses_RN, cells):
    return {
        variant.slug: [SeedOutcome(seed, float(loss)) for seed, loss in enumerate(losses)]
        for variant, losses in zip(variants(cells), losses_RN, strict=True)
    }


def test_a_fraction_folded_after_its_look_separates_a_string(tmp_path):
    """AB is planted: the string names four interactions, and only AB of the fold has a word."""
    cells, rng = fraction(8, folded=0), np.random.default_rng(4)
    assert cells[:16] == fraction(8) and len(set(cells)) == 32
    signs = np.where(cells, 1.0, -1.0)
    mean_R = 10 - 0.5 * signs[:, 0] + 0.5 * signs[:, 0] * signs[:, 1] + 0.05 * signs[:, 2]
    losses_RN = mean_R[:, None] + 0.05 * rng.standard_normal((32, 3))
    schedule = LookSchedule(LookPlan.fixed(3))

    def report(count, **options):
        design = DesignOptions("fractional", **options)
        effects = design.effects(variants(cells[:count]))
        rule = VerdictRule("factorial")
        plan = VerdictPlan(rule, design=design, schedule=schedule, declared={"": effects.contrasts})
        outcomes = outcomes_of(losses_RN[:count], cells[:count])
        study = judge_study(
            [("", effects.contrasts, outcomes)], with_record(plan, tmp_path), effects=effects
        )
        write_verdicts(study, tmp_path)
        return {v.contrast.name: v for v in study.verdicts}

    first = report(16)
    assert len(first) == 15 and first["AB=CG=DH=EF"].word is WORSE
    folded = report(32, folded="P")
    names = {"AB", "AC", "AD", "AE", "AF", "AG", "AH"}
    assert len(folded) == 22 and names < folded.keys() and "CG=DH=EF" in folded
    assert {v.contrast.scale for v in folded.values()} == {4 / 16, 4 / 32}
    assert (folded["AB"].word, folded["AB"].planned) == (WORSE, 20)
    assert folded["CG=DH=EF"].word is INCONCLUSIVE
    # A decision of the fraction stays; an open effect is estimated again, from all runs.
    assert folded["A P"].to_json() == first["A P"].to_json() and first["A P"].word is BETTER
    assert (len(folded["D S"].values), folded["D S"].look) == (32, 2)
    looks = json.loads((tmp_path / "verdicts.json").read_text())["looks"]
    assert [(look["n"], look["share"]) for look in looks] == [(3, 0.9), (3, 0.05)]


def judged(losses_RN, cells, design, rule):
    effects = design_effects(variants(cells), design)
    outcomes = outcomes_of(losses_RN, cells)
    return judge_study(
        [("", effects.contrasts, outcomes)], VerdictPlan(rule, design=DesignOptions(design))
    ).verdicts


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("noise", ["equal", "4 of 16 x3", "A x3", "one x10"])
def test_false_words_of_a_fraction(noise, n):
    """Planted effects are unbiased, and the others get at most 5 % false words per study."""
    cells, rng, studies = fraction(8), np.random.default_rng(n), 2000
    signs = np.where(cells, 1.0, -1.0)
    planted = {"A P": -2.0, "C R": -0.8, "AB=CG=DH=EF": 1.0}
    mean_R = signs[:, 0] * -1.0 + signs[:, 2] * -0.4 + signs[:, 0] * signs[:, 1] * 0.5
    scale_R = np.full(16, 0.71)
    if noise == "4 of 16 x3":
        scale_R[[1, 6, 11, 12]] *= 3
    elif noise == "A x3":
        scale_R[signs[:, 0] > 0] *= 3
    elif noise == "one x10":
        scale_R[5] *= 10
    estimates, false = [], 0
    for _ in range(studies):
        losses = 10 + mean_R[:, None] + scale_R[:, None] * rng.standard_normal((16, n))
        verdicts = judged(losses, cells, "fractional", VerdictRule("factorial"))
        estimates.append([verdict.difference for verdict in verdicts])
        names = [v.contrast.name for v in verdicts]
        false += any(v.word in (BETTER, WORSE) for v in verdicts if v.contrast.name not in planted)
    truth = np.array([planted.get(name, 0.0) for name in names])
    error = np.std(estimates, axis=0) / np.sqrt(studies)
    # Fifteen effects: three standard errors each would fail in 4 % of correct programs.
    assert (np.abs(np.mean(estimates, axis=0) - truth) < 3.5 * error).all()
    print(f"{noise} n={n}: false words {100 * false / studies:.1f} %")
    assert false / studies <= 0.05


@pytest.mark.slow
def test_the_web_page_has_the_same_words(factorial):
    missing = [cell for cell in full_design(3) if cell[1] and not cell[0]]
    for left_out, word in (((), "BETTER"), (missing, "not estimable")):
        page = report_page(
            build_table("demo", factorial(missing=left_out), verdict_plan=PLAN), PAGE
        )
        # Effects have no reference, and runs no verdict.
        assert ">against<" not in page and "against baseline<" not in page
        section = page.partition("Marginal means")[2]
        assert word in section and "no verdict" not in section
