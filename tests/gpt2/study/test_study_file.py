"""Studies of TOML files: content, the location of every problem, and plans made from them."""

from pathlib import Path

import pytest

from gpt2.check.cases import plan_cases
from gpt2.study.plan import make_plan, table_plan
from gpt2.study.study_file import read_study
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.project import ROOT
from tests.errors import error_of

GOOD = """\
name = "heads"
seeds = "1-3"

[[step]]
name = "baseline"
title = "GPT-2"

[[step]]
name = "two-heads"
title = "two heads of keys and values"
set = { ATTENTION_PROJECTION_GROUPED = true, N_KV_HEAD = 2 }
params = [-0.17, 0]

[[step]]
name = "ra"
title = "RA with alpha 0.3"
set.RECIPROCAL = true
set.RECIPROCAL_ALPHA = 0.30

[[step]]
name = "two-heads-ra"
title = "both"
parent = "two-heads"
like = "ra"
set.RECIPROCAL_WINDOW = 16
"""


@pytest.fixture
def study_file(tmp_path):
    """Return a function that writes study.toml."""

    def write(text: str) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text)
        return path

    return write


def layers(**settings):
    own = {"ABLATION_STUDY_OWN": True, **settings}
    return [
        *defconfig_layers(ROOT, "gpt2-ratio-small"),
        ConfigLayer.of("command line", "SET", own),
    ]


def test_a_file_is_a_study(study_file):
    study = read_study(study_file(GOOD))
    assert (study.name, study.seeds) == ("heads", (1, 2, 3))
    _, two, ra, both = study.steps
    assert (two.parent, two.params) == ("baseline", (-0.17, 0.0))
    # The digits of the file: 0.3 and 0.30 are one value, but a report shows what was written.
    assert ra.set == {"RECIPROCAL": True, "RECIPROCAL_ALPHA": "0.30"}
    assert both.set == {**ra.set, "RECIPROCAL_WINDOW": 16} and both.parent == "two-heads"


def test_its_runs_are_planned_with_its_seeds_and_names(study_file, tmp_path):
    study_file(GOOD)
    plan = make_plan(layers(), tmp_path)
    assert plan.folder == tmp_path / "results" / "heads"
    assert [run.label for run in plan.runs if run.seed == 2 and not run.variant.is_control] == [
        "heads/00-baseline s2",
        "heads/01-two-heads s2",
        "heads/02-ra s2",
        "heads/03-two-heads-ra s2",
    ]
    (both,) = [r for r in plan.runs if r.variant.slug == "two-heads-ra" and r.seed == 1]
    assert (both.variant.parent, both.variant.title) == ("two-heads", "both")
    assert both.config.values["RECIPROCAL_ALPHA"] == "0.30"
    assert {run.seed for run in table_plan(plan).runs} == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "seeds", "expected"),
    [({}, "7", {7}), ({"SEED_LIST": "4,5"}, "", {4, 5}), ({"SEED": 9}, "", {1, 2, 3})],
)
def test_seeds_of_the_command_line_and_of_the_configuration_come_first(
    study_file, tmp_path, settings, seeds, expected
):
    study_file(GOOD)
    plan = make_plan(layers(**settings), tmp_path, seeds=seeds)
    assert {run.seed for run in plan.runs} == expected


def test_a_run_needs_no_file(study_file, tmp_path):
    """Its configuration has every value: the same run planned without the file has its hash."""
    study_file(GOOD).rename(tmp_path / "mine.toml")
    chosen = layers(ABLATION_STUDY_FILE="mine.toml")
    assert plan_cases(chosen, "ra", tmp_path).study == "heads"
    (run,) = make_plan(chosen, tmp_path, steps="ra", seeds="1").runs
    values = dict(run.config.values)
    (tmp_path / "mine.toml").unlink()
    assert type(run.config).from_values(values).hash8 == run.config.hash8


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ('name = "heads"', 'name = "Heads 1"', "study.invalid-slug", 1),
        ('seeds = "1-3"', 'seeds = "1,1"', "study.invalid-value", 2),
        ('seeds = "1-3"', 'sedes = "1"', "study.unknown-key", 2),
        ('title = "both"', 'titel = "both"', "study.unknown-key", 22),
        ('title = "both"', "title = 3", "study.invalid-value", 22),
        ('title = "both"', f'title = "{"x" * 201}"', "study.invalid-value", 22),
        ('like = "ra"', 'like = "rb"', "study.unknown-step", 24),
        ("params = [-0.17, 0]", "params = [0, -1]", "study.invalid-value", 12),
        ("params = [-0.17, 0]", "params = [0.1]", "study.invalid-value", 12),
        ("params = [-0.17, 0]", "params = 3", "study.invalid-value", 12),
        ("set = {", 'parent = "two-heads-ra"\nset = {', "study.unknown-parent", 11),
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDOW = [16]", "study.invalid-value", 25),
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDOW = ", "study.syntax", 25),
        ('parent = "two-heads"', 'parent = "four"', "study.unknown-parent", 23),
        ('name = "two-heads-ra"', 'name = "ra"', "study.duplicate-step", 21),
        ('name = "two-heads-ra"', 'name = "baseline-aa"', "study.reserved-name", 21),
        ('name = "two-heads-ra"', 'name = "baseline-again"', "study.reserved-name", 21),
        ('title = "GPT-2"', "set = { BIAS = false }", "study.baseline-changes", 4),
        ("set.RECIPROCAL = true\nset.RECIPROCAL_ALPHA = 0.30\n", "", "study.empty-step", 14),
    ],
)
def test_a_wrong_file_names_its_line(study_file, old, new, code, line):
    path = study_file(GOOD.replace(old, new))
    # A wrong step is no problem of its children.
    (problem,) = error_of(read_study, path).problems
    assert problem.code == code
    assert problem.where == f"{path}:{line}"


@pytest.mark.parametrize(
    "text",
    ["", 'name = "a"\n', "a = " + "[" * 5000, "a = " + "9" * 5000, 'name = "a"\nstep = 3\n', "\0"],
)
def test_a_file_that_is_no_study_is_refused(study_file, text):
    assert all(code.startswith("study.") for code in error_of(read_study, study_file(text)).codes)


def test_a_damaged_file_is_a_study_or_an_error(study_file):
    lines = GOOD.splitlines(keepends=True)
    outcomes = set()
    for i, line in enumerate(lines):
        for damage in (
            "",
            line * 2,
            line[: len(line) // 2],
            f"{line.rstrip()}}}\n",
            "\x00",
            "[[step]]\n",
        ):
            try:
                read_study(study_file("".join([*lines[:i], damage, *lines[i + 1 :]])))
                outcomes.add("")
            except ConfigError as error:
                outcomes.update(error.codes)
    assert {"", "study.syntax", "study.invalid-slug"} <= outcomes


def test_a_missing_large_or_endless_file_is_refused(tmp_path, study_file):
    assert error_of(read_study, tmp_path / "study.toml").codes == ["study.unreadable"]
    assert error_of(read_study, study_file("#" * (1 << 20) + "\n")).codes == ["study.too-large"]
    assert error_of(read_study, Path("/dev/zero")).codes == ["study.unreadable"]


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDO = 16", "config.unknown-symbol", 25),
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDOW = -1", "config.out-of-range", 25),
        ("RECIPROCAL_WINDOW = 16", "SLIDING_WINDOW = 8", "config.unmet-dependency", 25),
        ("RECIPROCAL_WINDOW = 16", "SEED = 8", "study.plan-setting", 25),
        ("RECIPROCAL_WINDOW = 16", "SINGLE_TRAINING = true", "study.plan-setting", 25),
        ("RECIPROCAL_ALPHA = 0.30", "RECIPROCAL_ALPHA = 5.0", "config.out-of-range", 18),
        ("[-0.17, 0]", "[0, 0]", "study.size-out-of-range", 8),
        ('title = "both"', 'title = "both {"', "study.invalid-title", 22),
        ('title = "both"', 'title = "both }"', "study.invalid-title", 22),
        ('title = "both"', 'title = "{RECIPROCAL_WINDOW:.1f}"', "study.invalid-title", 22),
        ('title = "both"', 'title = "{RECIPROCAL_WINDOW!r}"', "study.invalid-title", 22),
        ('name = "heads"', 'name = "ratio"', "study.reserved-name", None),
        ('name = "heads"', 'name = "prolonged"', "study.reserved-name", None),
    ],
)
def test_a_change_without_effect_names_its_line(study_file, tmp_path, old, new, code, line):
    path = study_file(GOOD.replace(old, new))
    problem = error_of(make_plan, layers(), tmp_path).problems[0]
    assert problem.code == code
    assert problem.where.startswith(f"{path}:{line}: step heads/" if line else str(path))
