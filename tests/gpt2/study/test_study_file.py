"""Studies of TOML files: steps and their selection, plans, titles, and the line of every problem."""

import re
from pathlib import Path

import pytest

from gpt2.check.cases import plan_cases
from gpt2.study.plan import make_plan, table_plan
from gpt2.study.study_file import STUDIES, read_study
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

    def write(text):
        path = tmp_path / "study.toml"
        path.write_text(text)
        return path

    return write


def layers(**settings):
    own = {"ABLATION_STUDY_OWN": True, **settings}
    base = defconfig_layers(ROOT, "gpt2-ratio-small")
    return [*base, ConfigLayer.of("command line", "SET", own)]


def test_a_file_is_a_study(study_file):
    study = read_study(study_file(GOOD))
    assert (study.name, study.seeds) == ("heads", (1, 2, 3))
    _, two, ra, both = study.steps
    assert (two.parent, two.params) == ("baseline", (-0.17, 0.0))
    # The digits of the file: 0.3 and 0.30 are one value, but a report shows what was written.
    assert ra.set == {"RECIPROCAL": True, "RECIPROCAL_ALPHA": "0.30"}
    assert both.set == {**ra.set, "RECIPROCAL_WINDOW": 16} and both.parent == "two-heads"
    lineage = [step.slug for step in study.lineage(both)]
    assert lineage == ["baseline", "two-heads", "two-heads-ra"]
    assert study.label(both) == "heads/03-two-heads-ra"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", ["baseline", "two-heads", "ra", "two-heads-ra"]),
        ("2", ["ra"]),
        ("0-1,two-heads-ra", ["baseline", "two-heads", "two-heads-ra"]),
        # In the study's order, whatever the order of the words, and once each.
        ("two-heads-ra,0,ra,2", ["baseline", "ra", "two-heads-ra"]),
        # A slug is that step alone; a pattern is all that it matches.
        ("two-heads", ["two-heads"]),
        ("two*", ["two-heads", "two-heads-ra"]),
        ("ra 3", ["ra", "two-heads-ra"]),
    ],
)
def test_selects_numbers_ranges_slugs_and_patterns(study_file, text, expected):
    assert [step.slug for step in read_study(study_file(GOOD)).select(text)] == expected


def test_a_wrong_or_empty_selection_is_an_error(study_file):
    select = read_study(study_file(GOOD)).select
    error = error_of(select, "two-heds,9,2-4,1")
    text = str(error)
    assert error.codes == ["usage.unknown-step"] * 3
    assert "'two-heds'" in text and "nearest: two-heads" in text
    assert "'9'" in text and "'2-4'" in text and "0-3" in text and "'1'" not in text
    for empty in ("", " , "):
        assert error_of(select, empty).codes == ["usage.missing-argument"]


def test_its_runs_are_planned_with_its_names_and_need_no_file(study_file, tmp_path):
    study_file(GOOD).rename(tmp_path / "mine.toml")
    chosen = layers(ABLATION_STUDY_FILE="mine.toml")
    plan = make_plan(chosen, tmp_path)
    assert plan.folder == tmp_path / "results" / "heads"
    runs = [run for run in plan.runs if run.seed == 2 and not run.variant.is_control]
    numbered = ["00-baseline", "01-two-heads", "02-ra", "03-two-heads-ra"]
    assert [run.label for run in runs] == [f"heads/{name} s2" for name in numbered]
    assert (runs[3].variant.parent, runs[3].variant.title) == ("two-heads", "both")
    assert runs[3].config.values["RECIPROCAL_ALPHA"] == "0.30"
    assert {run.seed for run in table_plan(plan).runs} == {1, 2, 3}
    assert plan_cases(chosen, "ra", tmp_path).study == "heads"
    # The configuration of a run has every value.
    values = dict(runs[3].config.values)
    (tmp_path / "mine.toml").unlink()
    assert type(runs[3].config).from_values(values).hash8 == runs[3].config.hash8


@pytest.mark.parametrize(
    ("settings", "seeds", "expected"),
    [({}, "7", {7}), ({"SEED_LIST": "4,5"}, "", {4, 5}), ({"SEED": 9}, "", {1, 2, 3})],
)
def test_seeds_of_the_command_line_and_of_the_configuration_come_first(
    study_file, tmp_path, settings, seeds, expected
):
    study_file(GOOD)
    plan = make_plan(layers(**settings), tmp_path, steps="0", seeds=seeds)
    assert {run.seed for run in plan.runs} == expected


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ('name = "heads"', 'name = "Heads 1"', "invalid-slug", 1),
        ('seeds = "1-3"', 'seeds = "1,1"', "invalid-value", 2),
        ('seeds = "1-3"', 'sedes = "1"', "unknown-key", 2),
        ('seeds = "1-3"', 'judge = "no"', "invalid-value", 2),
        ('seeds = "1-3"', 'unit = "bits"', "invalid-value", 2),
        ('title = "both"', 'titel = "both"', "unknown-key", 22),
        ('title = "both"', "title = 3", "invalid-value", 22),
        ('title = "both"', f'title = "{"x" * 201}"', "invalid-value", 22),
        ('like = "ra"', 'like = "rb"', "unknown-step", 24),
        ("params = [-0.17, 0]", "params = [0, -1]", "invalid-value", 12),
        ("params = [-0.17, 0]", "params = [0.1]", "invalid-value", 12),
        ("params = [-0.17, 0]", "params = 3", "invalid-value", 12),
        ("set = {", 'parent = "two-heads-ra"\nset = {', "unknown-parent", 11),
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDOW = [16]", "invalid-value", 25),
        ("RECIPROCAL_WINDOW = 16", "RECIPROCAL_WINDOW = ", "syntax", 25),
        ('parent = "two-heads"', 'parent = "four"', "unknown-parent", 23),
        ('name = "two-heads-ra"', 'name = "ra"', "duplicate-step", 21),
        ('name = "two-heads-ra"', 'name = "baseline-aa"', "reserved-name", 21),
        ('name = "two-heads-ra"', 'name = "baseline-again"', "reserved-name", 21),
        ('title = "GPT-2"', "set = { BIAS = false }", "baseline-changes", 4),
        ("set.RECIPROCAL = true\nset.RECIPROCAL_ALPHA = 0.30\n", "", "empty-step", 14),
    ],
)
def test_a_wrong_file_names_its_line(study_file, old, new, code, line):
    path = study_file(GOOD.replace(old, new))
    # A wrong step is no problem of its children.
    (problem,) = error_of(read_study, path).problems
    assert problem.code == f"study.{code}" and problem.where == f"{path}:{line}"


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
        for damage in ("", line[: len(line) // 2], "[[step]]\n"):
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


BOTH = 'title = "both"'
WINDOW = "RECIPROCAL_WINDOW = 16"
NAME = 'name = "heads"'


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "what"),
    [
        (WINDOW, "RECIPROCAL_WINDO = 16", "config.unknown-symbol", 25, ""),
        (WINDOW, "RECIPROCAL_WINDOW = -1", "config.out-of-range", 25, ""),
        (WINDOW, "SLIDING_WINDOW = 8", "config.unmet-dependency", 25, ""),
        (WINDOW, "SEED = 8", "study.plan-setting", 25, ""),
        (WINDOW, "SINGLE_TRAINING = true", "study.plan-setting", 25, ""),
        ("RECIPROCAL_ALPHA = 0.30", "RECIPROCAL_ALPHA = 5.0", "config.out-of-range", 18, ""),
        ("[-0.17, 0]", "[0, 0]", "study.size-out-of-range", 8, ""),
        *((NAME, f'name = "{n}"', "study.reserved-name", 0, "") for n in ("ratio", "prolonged")),
        *(
            (BOTH, f'title = "both {title}"', "study.invalid-title", 22, what)
            for title, what in [
                ("{", "malformed"),
                ("}", "malformed"),
                ("{DROPOUT:.1f}", "unknown format of {DROPOUT}"),
                ("{DROPOUT!r}", "unknown format of {DROPOUT}"),
                ("{DROPUT}", "{DROPUT} .*nearest: DROPOUT"),
                # In the tree, but without an effect in the configuration of the step.
                ("{SLIDING_WINDOW}", "applies"),
                ("{}", "unknown field {}"),
                ("{BIAS:%}", "{BIAS:%}: not a number: True"),
                ("{BLOCK_SIZE:word}", "not a number"),
            ]
        ),
    ],
)
def test_a_change_without_effect_or_a_wrong_title_names_its_line(
    study_file, tmp_path, old, new, code, line, what
):
    path = study_file(GOOD.replace(old, new))
    problem = error_of(make_plan, layers(), tmp_path).problems[0]
    assert problem.code == code and re.search(what, problem.what)
    assert problem.where.startswith(f"{path}:{line}: step heads/" if line else str(path))
    assert ("{SYMBOL}" in problem.next) == (old == BOTH)


def test_plan_and_check_show_the_values_of_the_configuration(study_file, tmp_path):
    title = "{{r}} {RECIPROCAL_ALPHA}, {OPTIMIZER}, {DROPOUT:%} in {N_LAYER:word}"
    study_file(GOOD.replace('"both"', f'"{title}"').replace('"GPT-2"', '"{N_LAYER} layers"'))
    chosen = layers(MODEL_SIZE_CUSTOM=True, N_LAYER=3, N_HEAD=4, N_EMBD=96, DROPOUT="0.1")
    shown = "{r} 0.30, adamwspam, 10 % in three"
    titles = ["3 layers", "two heads of keys and values", "RA with alpha 0.3", shown]
    plan = make_plan(chosen, tmp_path, seeds="1")
    assert [run.variant.title for run in plan.runs] == titles
    assert [case.title for case in plan_cases(chosen, build_dir=tmp_path).every] == titles


def test_a_step_that_is_not_selected_may_have_a_wrong_title(study_file, tmp_path):
    study_file(GOOD.replace('"both"', '"{NO_SUCH}"'))
    plan = make_plan(layers(), tmp_path, steps="0,1", seeds="1")
    assert len(plan.runs) == 2 and "NO_SUCH" in plan.left_out[0].what


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_built_in_title_writes_no_number(study):
    numbers = re.compile(r"\d|\b(two|three|four|twice)\b")
    titles = [re.sub(r"GPT-2|{.*?}", "", step.title) for step in study.steps]
    assert [title for title in titles if numbers.search(title)] == []


# MLP_SIZING_PARAMS: equally many parameters in all steps, or a refusal that names the others.


@pytest.mark.parametrize("command", [make_plan, plan_cases])
def test_steps_with_a_sizing_of_their_own_are_refused_by_name(command, tmp_path):
    sizing = ConfigLayer.of("command line", "SET", {"MLP_SIZING_PARAMS": True})
    sized = [*defconfig_layers(ROOT, "gpt2-ratio-ablation"), sizing]
    (problem,) = error_of(command, sized, build_dir=tmp_path).problems
    assert problem.code == "study.unequal-parameters"
    assert problem.what.startswith("MLP_SIZING_PARAMS: 13 of 19 steps ")
    names = problem.what.partition("(got ")[2].rstrip(")").split(", ")
    assert len(names) == 13 and {"golden", "mla", "full"} <= {*names}
    followers = "baseline,pruned-50,ra,ract,ract-weights,ract-entropy"
    assert f"make STEPS={followers}," in problem.next
    assert error_of(command, sized, build_dir=tmp_path, steps="golden").problems == (problem,)
    plan = make_plan(sized, tmp_path, steps=followers)
    sizes = [run.config.model.num_params() for run in plan.runs]
    assert len(sizes) == 6 and max(sizes) / min(sizes) < 1.01
    assert "12" in "".join(map(str, plan.left_out))


def test_a_step_may_set_its_sizing_itself(study_file, tmp_path):
    text = GOOD.replace("set = {", "set = { MLP_SIZING_PARAMS = true,").replace("-0.17", "-0.01")
    study_file(text)
    assert len(make_plan(layers(), tmp_path, steps="0,1", seeds="1").runs) == 2
