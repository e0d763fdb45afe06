"""Marginal means recover planted effects, whatever cells are missing."""

import itertools

import pytest

from lib.report.columns import to_markdown
from lib.report.table import build_table, marginal_effects
from tests.lib.report.documents import document_of

EFFECTS = {"a": -0.30, "b": 0.05, "c": 0.0, "d": -0.01, "e": 0.2}


def rows(make_run, cells):
    """Return a table with one row per feature set; its loss is the sum of the features' effects."""
    runs = [
        make_run(
            "-".join(sorted(on)) or "none",
            3.0 + sum(EFFECTS[name] for name in on),
            number=number,
            levels={name: "on" if name in on else "off" for name in EFFECTS},
        )
        for number, on in enumerate(cells)
    ]
    return build_table("demo", runs)


def subsets():
    return [
        set(chosen)
        for count in range(len(EFFECTS) + 1)
        for chosen in itertools.combinations(EFFECTS, count)
    ]


def effects(table):
    """Return the difference of "on" to "off" by factor, whichever is the reference."""
    found = {}
    for m in marginal_effects(table):
        if m["difference"] is not None:
            sign = 1 if m["level"] == "on" else -1
            found[m["factor"]] = (sign * m["difference"]["mean"], m["difference"]["n"])
    return found


def test_over_all_subsets_every_effect_is_recovered_from_sixteen_pairs(make_run):
    found = effects(rows(make_run, subsets()))
    assert found == {name: (pytest.approx(effect), 16) for name, effect in EFFECTS.items()}


def test_cells_that_are_left_out_shift_no_effect(make_run):
    # e needs b: cells with e alone are left out, so that b has fewer pairs.
    cells = [on for on in subsets() if "e" not in on or "b" in on]
    found = effects(rows(make_run, cells))
    assert {name: effect for name, (effect, _) in found.items()} == pytest.approx(EFFECTS)
    assert found["b"][1] == 8 and found["e"][1] == 8 and found["a"][1] == 12


@pytest.mark.parametrize("design", ["leave_one_out", "add_one_in", "cumulative"])
def test_designs_of_single_changes_have_one_pair_for_each_feature(make_run, design):
    names = list(EFFECTS)
    cells = {
        "leave_one_out": [set(names), *(set(names) - {n} for n in names)],
        "add_one_in": [set(), *({n} for n in names)],
        "cumulative": [set(names[:i]) for i in range(len(names) + 1)],
    }[design]
    found = effects(rows(make_run, cells))
    assert found == {name: (pytest.approx(effect), 1) for name, effect in EFFECTS.items()}


def test_levels_that_stand_nowhere_beside_each_other_have_no_difference(make_run):
    """Two optimizers with three pruners, and one that takes none of those but a fourth."""
    optimizers, pruners = {"sgd": 0.9, "adam": 0.0}, {"none": 0.0, "mag": 0.01, "move": 0.04}
    cells = [(o, p, 2.5 + x + y) for o, x in optimizers.items() for p, y in pruners.items()]
    cells = [("own", "state", 2.4), *cells]
    runs = [
        make_run(f"{o}-{p}", loss, number=i, levels={"OPTIMIZER": o, "PRUNING": p})
        for i, (o, p, loss) in enumerate(cells)
    ]
    table = build_table("demo", runs)
    found = {m["level"]: m for m in marginal_effects(table)}
    # The first row's levels are no reference: they stand beside none.
    assert {m["reference"] for m in found.values()} == {"sgd", "none"}
    assert (
        found["adam"]["difference"]["mean"] == pytest.approx(-0.9)
        and found["adam"]["difference"]["n"] == 3
    )
    assert (
        found["mag"]["difference"]["mean"] == pytest.approx(0.01)
        and found["mag"]["difference"]["n"] == 2
    )
    assert found["move"]["difference"]["mean"] == pytest.approx(0.04)
    assert (
        found["own"]["difference"]
        is found["state"]["difference"]
        is found["sgd"]["difference"]
        is None
    )
    assert found["none"]["val_loss"] == pytest.approx(2.95) and found["none"]["cells"] == 2
    lines = [line.split() for line in to_markdown(document_of(table)).splitlines()]
    assert ["|", "OPTIMIZER", "|", "own", "|", "1", "|", "2.4000", "|", "-", "|", "0", "|"] in lines
    assert [
        "|",
        "OPTIMIZER",
        "|",
        "sgd",
        "|",
        "3",
        "|",
        "3.4167",
        "|",
        "reference",
        "|",
        "-",
        "|",
    ] in lines
    assert [
        "|",
        "OPTIMIZER",
        "|",
        "adam",
        "|",
        "3",
        "|",
        "2.5167",
        "|",
        "-0.9000",
        "±",
        "0.0000",
        "|",
        "3",
        "|",
    ] in lines


def test_a_factor_that_part_of_the_cells_lacks(make_run):
    runs = [
        make_run("none", 3.0, levels={"PRUNING": "none"}),
        make_run("m3", 3.1, number=1, levels={"PRUNING": "magnitude", "SPARSITY": "0.3"}),
        make_run("m9", 3.4, number=2, levels={"PRUNING": "magnitude", "SPARSITY": "0.9"}),
    ]
    none, magnitude, low, high = marginal_effects(build_table("demo", runs))
    assert none["difference"] is magnitude["difference"] is low["difference"] is None
    assert magnitude["val_loss"] == pytest.approx(3.25)
    assert (high["difference"]["mean"], high["difference"]["n"]) == (pytest.approx(0.3), 1)


def test_a_study_of_steps_has_no_marginal_means(make_run):
    assert "Marginal" not in to_markdown(document_of(build_table("demo", [make_run("base", 3.0)])))


def test_a_result_from_another_study_is_named(make_run):
    runs = [make_run("base", 3.0, study="earlier"), make_run("wide", 2.9, parent="base")]
    assert "earlier/base-s1-base1" in to_markdown(document_of(build_table("demo", runs)))
