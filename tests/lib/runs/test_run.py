"""Planned runs: seeds, blocks, patterns and run directories."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.runs.run import RunVariant, build_runs, parse_seeds, training_order
from lib.runs.run_dir import RunDir, RunStatus, State, write_status


@dataclass(frozen=True)
class Named:
    hash8: str

    def identity(self):
        return {"name": self.hash8}


def test_every_variant_is_trained_once_before_any_is_trained_again():
    variants = [RunVariant("a", number=0), RunVariant("b", number=1)]
    blocks = {s: [(v, Named(f"{v.slug}{s}")) for v in variants] for s in (3, 1)}
    runs = build_runs("study", Path("results"), blocks)
    labels = ["study/00-a s3", "study/01-b s3", "study/00-a s1", "study/01-b s1"]
    assert [run.label for run in runs] == labels and runs[0].path == Path("results/study/a-s3-a3")
    # Two names for one run are refused.
    block = [(RunVariant(slug), Named("aaaaaaaa")) for slug in "ab"]
    with pytest.raises(ConfigError) as caught:
        build_runs("study", Path("results"), {1: block})
    assert caught.value.codes == ["run.duplicate"]
    assert "study/b s1 equals study/a s1" in str(caught.value)


def test_the_runs_of_a_block_are_trained_in_random_order():
    variants = [RunVariant(f"v{i}", number=i) for i in range(9)]
    blocks = {s: [(v, Named(f"{v.number}{s}")) for v in variants] for s in (3, 1, 2, 4)}
    runs = build_runs("study", Path("results"), blocks)
    ordered = training_order(runs)
    assert [run.seed for run in ordered] == [run.seed for run in runs]
    orders = [tuple(r.variant.slug for r in ordered[i : i + 9]) for i in range(0, 36, 9)]
    assert len({tuple(r.variant.slug for r in runs[:9]), *orders}) == 5
    # Each block has every run once; the order depends on the seed and the names only.
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert training_order(list(reversed(runs)))[-9:] == ordered[:9]
    some = [run for run in runs if run.variant.number in (2, 5, 7)]
    assert training_order(some) == [run for run in ordered if run in some]
    # The same on every machine.
    assert " ".join(orders[0]) == "v6 v2 v4 v5 v0 v3 v8 v1 v7"


def test_the_baseline_is_first_and_a_parent_before_its_children():
    parents = {"base": "", "a": "base", "b": "a", "c": "b", "d": "a", "e": "base", "f": "e"}
    again = RunVariant("base-again", parent="base", is_repeat=True)
    variants = [*(RunVariant(slug, parent=parent) for slug, parent in parents.items()), again]
    blocks = {s: [(v, Named(f"{v.slug}{s}")) for v in variants] for s in range(20)}
    ordered = training_order(build_runs("study", Path("results"), blocks))
    orders = [[r.variant.slug for r in ordered if r.seed == seed] for seed in blocks]
    for order in orders:
        assert order[0] == "base" and order[-1] == "base-again" and len({*order}) == 8
        assert all(order.index(p) < order.index(slug) for slug, p in parents.items() if p)
    assert len({tuple(order) for order in orders}) > 10
    # A step without its parent, as with STEPS=, keeps its place.
    part = build_runs("study", Path("results"), {s: [b[0], b[3]] for s, b in blocks.items()})
    assert [run.variant.slug for run in training_order(part)] == ["base", "c"] * 20


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        *((name, ["a-b"]) for name in ("a-b", "7", "study/07-a-b", "a-*", "a-b-s1-*")),
        ("study/*", ["a-b", "study-c"]),
        # Not every run of a study whose name begins alike.
        ("st*", ["study-c"]),
        ("a", []),
        ("17", []),
    ],
)
def test_a_pattern_names_a_run_in_several_ways(pattern, matched):
    block = [(RunVariant("a-b", number=7), Named("f")), (RunVariant("study-c"), Named("g"))]
    runs = build_runs("study", Path("results"), {1: block})
    assert [run.variant.slug for run in runs if run.matches(pattern)] == matched


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *{"1": (1,), "1,2 5": (1, 2, 5), "2-4": (2, 3, 4), "": ()}.items(),
        *dict.fromkeys(
            ("x", "1,-2", "3-1", "1.5", "1-9999999999", "01", "1-03", "１"), "usage.invalid-seed"
        ).items(),
        *dict.fromkeys(("1,1", "1-3,2"), "usage.duplicate-seed").items(),
    ],
)
def test_seeds(text, expected):
    if isinstance(expected, tuple):
        assert parse_seeds(text) == expected
        return
    with pytest.raises(ConfigError) as caught:
        parse_seeds(text)
    assert caught.value.codes == [expected]


def planned(folder, study, slug, hash8="0123abcd"):
    """Return two runs of a configuration, of the seeds 1 and 2."""
    return build_runs(study, folder, {s: [(RunVariant(slug), Named(hash8))] for s in (1, 2)})


@pytest.mark.parametrize(("study", "slug"), [("two", "none"), ("one", "b")])
def test_a_finished_run_of_another_study_or_name_is_taken(tmp_path, study, slug):
    done, begun = planned(tmp_path, "one", "base")
    for run, state in ((done, State.SUCCESS), (begun, State.INTERRUPTED)):
        run.path.mkdir(parents=True)
        write_status(RunDir(run.path), RunStatus(state))
    # The directory of a run that was moved aside has a different suffix.
    done.path.with_name(f"{done.path.name}.old-20260101-000000").mkdir()
    taken, own = planned(tmp_path, study, slug)
    assert taken.path == done.path and taken.label == f"{study}/{slug} s1"
    # An unfinished run is trained anew.
    assert own.path == tmp_path / study / f"{slug}-s2-0123abcd"
    # The own directory of the run comes first.
    (tmp_path / study / taken.name).mkdir(parents=True)
    assert planned(tmp_path, study, slug)[0].path == tmp_path / study / taken.name
    # Another configuration is another run.
    other, _ = planned(tmp_path, "two", "base", "0123abce")
    assert other.path == tmp_path / "two/base-s1-0123abce"
