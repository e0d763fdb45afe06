"""Requirements on finalists, and the p-values that few seeds can reach."""

import itertools
import json
import math
import re

import pytest

from lib.errors import ConfigError
from lib.report.finalists import compare_over_seeds, significance_to_json, significance_to_text
from lib.report.significance import permutation_p, smallest_permutation_p
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import IDENTITY, MANIFEST, changed, write_run


@pytest.fixture
def seeds(tmp_path):
    """Return a factory of finished runs of one variant, one per loss, with seeds from 1."""

    def make(slug, losses, manifest=MANIFEST, symbols=None, **identity):
        return [
            write_run(
                tmp_path / f"{slug}-s{seed}-0123abcd",
                identity=changed(IDENTITY, seed=seed, **identity),
                manifest=manifest,
                symbols=symbols,
                final={"val_loss": loss},
            )
            for seed, loss in enumerate(losses, 1)
        ]

    return make


def test_a_proper_set_shows_everything(seeds):
    runs = seeds("base", (3.0, 3.1, 3.05)) + seeds("ra", (2.8, 2.95, 2.9), machine__compile=True)
    report = compare_over_seeds(runs, {"machine.compile": "COMPILE"})
    assert report.exit_code == 0 and [g.problems for g in report.groups] == [[], []]
    (contrast,) = report.contrasts
    assert contrast.changes == ["COMPILE: False, True"]
    assert contrast.paired.mean == pytest.approx(-1 / 6)
    # All three seeds agree: as far as three seeds reach.
    assert (contrast.paired.p, contrast.paired_smallest_p) == (0.25, 0.25)
    assert (contrast.unpaired_p, contrast.unpaired_smallest_p) == (0.1, 0.1)
    text = significance_to_text(report)
    assert "seed 2      3.1\n" in text and "n=3, mean 3.0500, sd 0.0500" in text
    (paired,) = re.findall(r"^  paired .*$", text, re.MULTILINE)
    (unpaired,) = re.findall(r"^  unpaired .*$", text, re.MULTILINE)
    assert paired.count("p=0.25") == 2 and "3 seeds" in paired
    assert unpaired.count("p=0.1") == 2
    assert json.loads(significance_to_json(report))["groups"][0]["seeds"][1]["loss"] == 3.1


def test_too_few_seeds_are_refused(seeds):
    report = compare_over_seeds(seeds("base", (3.0, 3.1)), {})
    assert report.exit_code == 4 and report.groups[0].loss is None
    (refused,) = re.findall(r"^  REFUSED .*$", significance_to_text(report), re.MULTILINE)
    assert "at least 3" in refused and "n=2" in refused
    # A configuration may ask for more, never for less.
    runs = seeds("many", (3.0, 3.1, 3.12), symbols={"FINALIST_MIN_SEEDS": 4})
    (problem,) = compare_over_seeds(runs, {}).groups[0].problems
    assert "at least 4" in problem and "n=3" in problem


def test_a_duplicate_seed_is_refused(seeds, tmp_path):
    runs = seeds("base", (3.0, 3.1, 3.12))
    copy = write_run(
        tmp_path / "copy", identity=changed(IDENTITY, seed=2), final={"val_loss": 3.11}
    )
    report = compare_over_seeds([*runs, copy], {})
    assert report.groups[0].problems == ["duplicate seed 2"]


def test_a_seed_that_diverged_is_shown_and_never_dropped(seeds):
    runs = seeds("base", (3.0, 3.1, 3.12, 3.13))
    write_status(RunDir(runs[1].path), RunStatus(State.FAILED, 1, "loss is nan at it 7"))
    report = compare_over_seeds(runs, {})
    assert report.exit_code == 4 and report.groups[0].loss is None
    (problem,) = report.groups[0].problems
    assert problem.startswith("seed 2 diverged: loss is nan at it 7")
    text = significance_to_text(report)
    assert "seed 2      diverged: loss is nan at it 7" in text and "3.13" in text


def test_losses_that_are_all_the_same_are_refused(seeds):
    report = compare_over_seeds(seeds("base", (3.0, 3.0, 3.0)), {})
    assert report.exit_code == 4 and report.groups[0].loss is None
    (problem,) = report.groups[0].problems
    assert "identical" in problem


def test_a_model_that_has_learnt_nothing_is_refused(seeds):
    report = compare_over_seeds(seeds("base", (3.0, 3.1, math.log(257))), {})
    (problem,) = report.groups[0].problems
    assert problem.startswith("seed 3 is untrained") and "5.5491" in problem and "3.1450" in problem


def test_finalists_on_other_data_are_refused(seeds):
    other = changed(MANIFEST, data__digest="d2")
    runs = seeds("base", (3.0, 3.1, 3.12))
    runs += seeds("ra", (2.0, 2.1, 2.2), manifest=other, machine__compile=True)
    report = compare_over_seeds(runs, {})
    assert (report.exit_code, report.contrasts) == (4, [])
    assert report.problems == ["ra cannot be compared with base: data: d1, d2"]


def test_no_run_is_the_users_error(tmp_path):
    for runs, code in (([], "usage.missing-argument"), ([RunDir(tmp_path)], "run.not-found")):
        with pytest.raises(ConfigError) as caught:
            compare_over_seeds(runs, {})
        assert caught.value.codes == [code] and "RUNS" in str(caught.value)


def test_permutation_p_by_counting():
    a, b = (1.0, 2.0, 4.0), (3.0, 5.0, 9.0, 8.0)
    values, gap = [*a, *b], abs(sum(a) / 3 - sum(b) / 4)
    dealt = [
        abs(sum(values[i] for i in first) / 3 - (sum(values) - sum(values[i] for i in first)) / 4)
        for first in itertools.combinations(range(7), 3)
    ]
    assert permutation_p(a, b) == sum(g >= gap - 1e-12 for g in dealt) / 35
    assert permutation_p((1.0,), b) is None


@pytest.mark.parametrize(("n", "p"), [(3, 0.1), (4, 0.0286), (5, 0.0079), (6, 0.0022)])
def test_smallest_permutation_p(n, p):
    assert smallest_permutation_p(n, n) == pytest.approx(p, abs=5e-5)
    assert permutation_p(range(n), range(n, 2 * n)) == pytest.approx(smallest_permutation_p(n, n))
