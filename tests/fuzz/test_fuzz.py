"""No damaged file makes a command crash or deceive: saved failures, a few cases, and many by -m fuzz."""

import fnmatch
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from lib.project import ROOT
from tests.fuzz import mutations
from tests.fuzz.harness import Case, Study, temporary_folder
from tests.fuzz.study import trained_study

CASES = ROOT / "tests/fuzz/cases"
SHARE = 30
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


def load(path: Path, study: Study) -> Case:
    """Return a saved case for ``study``."""
    fields = json.loads(path.read_text())
    folders = {str(Path(name).parent) for name in study.files}
    (file,) = fnmatch.filter([*study.files, *folders], fields["file"])
    return Case(fields["command"], file, fields["operations"])


@st.composite
def cases(draw: st.DrawFn, study: Study) -> Case:
    """Folders and kinds of files are equally likely, not files; some whole runs are replaced."""
    file = draw(
        st.sampled_from(sorted(study.kinds)).flatmap(lambda k: st.sampled_from(study.kinds[k]))
    )
    command = draw(st.sampled_from(study.commands_for(file)))
    if file.startswith("results/") and file.count("/") == 3 and draw(st.integers(0, 19)) == 0:
        return Case(command, str(Path(file).parent), draw(mutations.NODE))
    return Case(command, file, draw(mutations.operations(study.tree / file)))


def check_cases(study: Study, count: int, number: int) -> None:
    """Check drawn cases; a failure belongs in tests/fuzz/cases, with * for a hash."""

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(cases(study))
    def check(case: Case) -> None:
        assert study.check(case) == ""

    check()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_a_saved_failure_does_not_return(study, path):
    assert study.check(load(path, study)) == ""


@pytest.mark.slow
def test_damaged_files_make_no_command_crash_or_deceive(study):
    check_cases(study, SHARE, 7)


@pytest.mark.slow
def test_each_kind_of_failure_is_noticed(study, monkeypatch):
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
def test_damage_at_length(study):
    check_cases(study, COUNT, SEED)
