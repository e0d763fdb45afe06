"""Saved failures and a small share of make fuzz: no damaged file makes a command crash or deceive."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.make_variables import EXPORTED, GIVEN, TARGET
from tests.fuzz import fuzz
from tests.fuzz.fuzz import CASES, draw_cases, load, temporary_folder
from tests.fuzz.harness import Case, Study
from tests.fuzz.study import trained_study

SHARE = 8


@pytest.fixture(scope="module")
def study() -> Iterator[Study]:
    with temporary_folder() as folder:
        yield trained_study(Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_a_saved_failure_does_not_return(study: Study, path: Path) -> None:
    assert study.check(load(path, study)) == ""


@pytest.mark.slow
def test_damaged_files_make_no_command_crash_or_deceive(study: Study) -> None:
    failures = [
        (failure, case) for case in draw_cases(study, SHARE, 7) if (failure := study.check(case))
    ]
    assert not failures


@pytest.mark.slow
def test_each_kind_of_failure_is_noticed(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that do what none may do."""
    run = study.tree / Path(study.a).relative_to(study.tree)

    def crash() -> int:
        raise KeyError("a defect")

    def write() -> int:
        (run / "summary.json").write_text("{}")
        return 0

    def execute() -> int:
        (study.tree / "canary").mkdir()
        return 0

    def follow() -> int:
        study.victim.write_text("lost")
        return 0

    case = Case("plan", "text/0.txt", [["flip", 0.5, 1]])
    seen = []
    for main in (crash, write, execute, follow, lambda: 77):
        monkeypatch.setitem(study.mains, "plan", main)
        seen.append(study.check(case).partition(":")[0])
    expected = ["traceback", "changed", "code executed", "written through a link", "exit code 77"]
    assert seen == expected


def test_the_commands_under_test_do_not_read_the_variables_of_make_fuzz(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {TARGET: "fuzz", GIVEN: "COUNT SEED", EXPORTED: "", "COUNT": "1", "SEED": "3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = {}
    monkeypatch.setattr(fuzz, "trained_study", lambda folder: seen.update(os.environ))
    monkeypatch.setattr(fuzz, "draw_cases", lambda *_: ())
    monkeypatch.setattr("sys.argv", ["fuzz"])
    assert fuzz.main() == 0
    assert not seen.keys() & given.keys()
