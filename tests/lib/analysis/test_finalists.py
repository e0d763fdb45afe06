"""What is asked of finalists, and what their tests can show."""

import itertools
import json
import math

import pytest

from lib.analysis.finalists import judge_finalists
from lib.analysis.finalists_text import finalists_json, finalists_text
from lib.analysis.significance import permutation_p, smallest_permutation_p
from lib.errors import ConfigError
from lib.rundir import RunDir
from lib.status import State, Status, write_status
from tests.lib.fabricated import IDENTITY, MANIFEST, changed, write_run


@pytest.fixture
def seeds(tmp_path):
    """Finished runs of one variant, a loss for each seed from 1."""

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
    report = judge_finalists(runs, {"machine.compile": "COMPILE"})
    assert report.exit_code == 0 and [g.problems for g in report.groups] == [[], []]
    (contrast,) = report.contrasts
    assert contrast.changes == ["COMPILE: False, True"]
    assert contrast.paired.mean == pytest.approx(-1 / 6)
    # All three seeds agree: as far as three seeds reach.
    assert (contrast.paired.p, contrast.paired_smallest_p) == (0.25, 0.25)
    assert (contrast.unpaired_p, contrast.unpaired_smallest_p) == (0.1, 0.1)
    text = finalists_text(report)
    assert "seed 2      3.1\n" in text and "n=3, mean 3.0500, sd 0.0500 nats per token" in text
    assert (
        "p=0.25 by the exact sign-flip test over 3 seeds; the smallest it can reach is 0.25" in text
    )
    assert "p=0.1 by the exact permutation test; the smallest it can reach is 0.1" in text
    assert json.loads(finalists_json(report))["groups"][0]["seeds"][1]["loss"] == 3.1


def test_too_few_seeds_are_refused(seeds):
    report = judge_finalists(seeds("base", (3.0, 3.1)), {})
    assert report.exit_code == 4 and report.groups[0].loss is None
    assert "REFUSED  n=2: at least 3 seeds are needed" in finalists_text(report)
    # A configuration may ask for more, never for less.
    runs = seeds("many", (3.0, 3.1, 3.12), symbols={"FINALIST_MIN_SEEDS": 4})
    assert judge_finalists(runs, {}).groups[0].problems == ["n=3: at least 4 seeds are needed"]


def test_a_seed_that_stands_there_twice_is_refused(seeds, tmp_path):
    runs = seeds("base", (3.0, 3.1, 3.12))
    copy = write_run(
        tmp_path / "copy", identity=changed(IDENTITY, seed=2), final={"val_loss": 3.11}
    )
    report = judge_finalists([*runs, copy], {})
    assert report.groups[0].problems == ["seed 2 stands there more than once"]


def test_a_seed_that_diverged_is_shown_and_never_dropped(seeds):
    runs = seeds("base", (3.0, 3.1, 3.12, 3.13))
    write_status(RunDir(runs[1].path), Status(State.FAILED, 1, "loss is nan at it 7"))
    report = judge_finalists(runs, {})
    assert report.exit_code == 4 and report.groups[0].loss is None
    assert report.groups[0].problems == [
        "seed 2 diverged: loss is nan at it 7; a mean over the others would hide it"
    ]
    text = finalists_text(report)
    assert "seed 2      diverged: loss is nan at it 7" in text and "3.13" in text


def test_losses_that_are_all_the_same_are_refused(seeds):
    report = judge_finalists(seeds("base", (3.0, 3.0, 3.0)), {})
    assert "the seed has no effect" in report.groups[0].problems[0]


def test_a_model_that_has_learnt_nothing_is_refused(seeds):
    report = judge_finalists(seeds("base", (3.0, 3.1, math.log(257))), {})
    (problem,) = report.groups[0].problems
    assert problem.startswith("seed 3 is untrained: its loss of 5.5491 is no better")


def test_finalists_on_other_data_are_refused(seeds):
    other = changed(MANIFEST, data__digest="d2")
    runs = seeds("base", (3.0, 3.1, 3.12))
    runs += seeds("ra", (2.0, 2.1, 2.2), manifest=other, machine__compile=True)
    report = judge_finalists(runs, {})
    assert (report.exit_code, report.contrasts) == (4, [])
    assert report.problems == ["ra cannot be compared with base: data: d1, d2"]


def test_no_run_is_the_users_error(tmp_path):
    for runs in ([], [RunDir(tmp_path)]):
        with pytest.raises(ConfigError, match="RUNS"):
            judge_finalists(runs, {})


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
