"""Faults are drawn from the executed lines of the areas, and planted without a change of files."""

import re
from collections import Counter

import pytest

from gpt2.mutation import command
from gpt2.mutation.baseline import baseline_jobs
from gpt2.mutation.cases import CASES, TrialCase, check_case, config_digests
from gpt2.mutation.faults import AREAS, SourceTree, area_of, draw, in_area
from gpt2.mutation.process import _write_guard
from lib.errors import ConfigError
from lib.project import ROOT
from tests.options import options

SCHEDULE = "lib/optim/schedule.py"


@pytest.fixture(scope="module")
def tree():
    return SourceTree(ROOT)


@pytest.fixture(scope="module")
def faults(tree):
    """Return the faults of one file, as if one case executed its functions."""
    count = len((ROOT / SCHEDULE).read_text().splitlines())
    coverage = {SCHEDULE: dict.fromkeys(range(count), ("a",))}
    return [f for f in tree.faults(coverage, ["a", "b"]) if f.path == SCHEDULE]


def test_every_area_has_files_and_no_file_of_the_checks_is_changed(tree):
    assert {area_of(path) for path in tree.paths} == set(AREAS)
    assert not [p for p in tree.paths if re.search(r"gpt2/(check|mutation)/|reference|report/", p)]


@pytest.mark.slow
def test_a_fault_changes_the_code_and_no_file(tree, faults):
    before = (ROOT / SCHEDULE).read_bytes()
    for fault in draw(faults, 40, seed=1):
        assert tree.planted(fault).co_filename == str(ROOT / SCHEDULE)
        old, new = tree.described(fault)
        assert tree.is_same_code(fault) or old != new
    assert (ROOT / SCHEDULE).read_bytes() == before


def test_a_changed_number_is_other_code(tree, faults):
    numbers = [fault for fault in faults if fault.operator == "number"]
    assert numbers and not any(tree.is_same_code(fault) for fault in numbers)


def test_small_forms_and_sizes_of_chunks_are_not_changed(tree):
    coverage = {"gpt2/loss.py": {60: ("a",)}, SCHEDULE: dict.fromkeys(range(60), ("a",))}
    lines = {path: (ROOT / path).read_text().splitlines() for path in coverage}
    changed = [f for f in tree.faults(coverage, ["a"]) if f.path in coverage]
    texts = [lines[fault.path][fault.line - 1] for fault in changed]
    assert texts and not [text for text in texts if re.match(r"_SMALL_|[A-Z_]*BLOCK_", text)]
    assert not [fault for fault in changed if fault.function == "_small_learning_rate"]


def test_a_draw_is_deterministic_and_without_repetition(faults):
    drawn = draw(faults, 30, seed=3)
    assert drawn == draw(faults, 30, seed=3) != draw(faults, 30, seed=4)
    assert len(set(drawn)) == 30
    operators = Counter(fault.operator for fault in drawn)
    assert len(operators) >= 5


def test_areas_files_and_lines_are_selected(faults):
    assert in_area(faults, "schedule") == in_area(faults, SCHEDULE) == faults
    line = faults[0].line
    assert {fault.line for fault in in_area(faults, f"{SCHEDULE}:{line}")} == {line}


@pytest.mark.parametrize(
    ("selection", "code"),
    [("weather", "usage.unknown-area"), (f"{SCHEDULE}:1", "usage.no-fault")],
)
def test_a_selection_without_faults_is_an_error(faults, selection, code):
    with pytest.raises(ConfigError) as error:
        in_area(faults, selection)
    assert error.value.codes == [code]


def test_a_count_of_zero_and_an_unknown_area_are_errors_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        options("mutation-test", "--count", "0")
    assert error.value.codes == ["usage.out-of-range"]
    with pytest.raises(ConfigError) as error:
        command.run(options("mutation-test", "-O", str(tmp_path), "--area", "pruning,weather"))
    assert error.value.codes == ["usage.unknown-area"]


def test_the_cases_resolve_and_run():
    for case in CASES.values():
        chosen, _ = check_case(case)
        assert chosen.config is not None, chosen.problems
    assert {name for _, name in baseline_jobs()} == {*CASES, ""}
    assert all(config_digests().values())


@pytest.mark.parametrize(
    ("slug", "others"), [("sliding", ["baseline", "nsa"]), ("nsa-mean", ["nsa"]), ("baseline", [])]
)
def test_a_step_is_checked_beside_its_parent_and_the_steps_of_its_title(slug, others):
    assert list(check_case(TrialCase("nsa-quickstart", slug))[1]) == others


def test_a_write_outside_of_the_folder_is_refused(tmp_path):
    guard = _write_guard(tmp_path)
    guard("open", (str(tmp_path / "a"), "w", 0o1101))
    guard("open", (str(ROOT / "README.md"), "r", 0))
    guard("open", ("/dev/null", "w", 1))
    guard("os.remove", (str(tmp_path / "a"), -1))
    for event, arguments in (
        ("open", (str(ROOT / "README.md"), "w", 0o1101)),
        ("os.remove", (str(ROOT / "README.md"), -1)),
        ("os.rename", (str(tmp_path / "a"), str(ROOT / "b"), -1, -1)),
        ("shutil.rmtree", (str(tmp_path.parent), None)),
    ):
        with pytest.raises(PermissionError):
            guard(event, arguments)
