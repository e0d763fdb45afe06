"""No damaged file makes a command crash or deceive: saved failures, a few cases, and many by -m fuzz."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.fuzz import CASES, draw_cases, load, temporary_folder
from tests.fuzz.harness import Case, Study
from tests.fuzz.study import trained_study

SHARE = 25
COUNT, SEED = (
    int(os.environ.get(name) or default) for name, default in (("COUNT", 500), ("SEED", 1))
)


@pytest.fixture(scope="module")
def study() -> Iterator[Study]:
    with temporary_folder() as folder, pytest.MonkeyPatch.context() as patch:
        # The commands under test would read them.
        for name in ("COUNT", "SEED"):
            patch.delenv(name, raising=False)
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


@pytest.mark.fuzz
def test_damage_at_length(study: Study) -> None:
    """Draw COUNT cases from SEED; a failure belongs in tests/fuzz/cases, with * for a hash."""
    failures = []
    for case in draw_cases(study, COUNT, SEED):
        if failure := study.check(case):
            failures.append((failure, case))
    assert not failures
