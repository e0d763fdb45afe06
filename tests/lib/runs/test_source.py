"""Digests of loaded code."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from lib.files import sha256_file
from lib.project import ROOT
from lib.runs import code


def test_loaded_modules_are_digested_unless_they_only_run_or_read() -> None:
    import gpt2.study.step  # noqa: F401

    recorded = code.loaded_source()
    assert recorded["lib/files.py"] == sha256_file(ROOT / "lib/files.py")
    assert all(name.startswith(("gpt2/", "lib/")) for name in recorded)
    assert "gpt2/study/step.py" not in recorded
    # An older record may have such files.
    assert code.changed_since(recorded | {"gpt2/study/step.py": "0" * 64}) == []


def test_edited_and_missing_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte counts, also that of a comment."""
    monkeypatch.setattr("lib.runs.code.ROOT", tmp_path)
    for name in ("same.py", "edited.py", "gone.py"):
        (tmp_path / name).write_text("x = 1\n")
    recorded = {path.name: sha256_file(path) for path in tmp_path.iterdir()}
    assert code.changed_since(recorded) == []
    (tmp_path / "edited.py").write_text("x = 1  # The first.\n")
    (tmp_path / "gone.py").unlink()
    assert set(code.changed_since(recorded)) == {"edited.py", "gone.py"}


@pytest.mark.parametrize("event", ["edited", "removed"])
def test_code_that_changed_after_it_was_loaded_is_never_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "invented.py"
    file.write_text("x = 1\n")
    module = ModuleType("lib.invented")
    module.__file__ = str(file)
    monkeypatch.setattr("lib.runs.code.ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "lib.invented", module)
    os.utime(file, ns=(1, 1))
    assert code.loaded_source() == {"lib/invented.py": sha256_file(file)}
    os.utime(file) if event == "edited" else file.unlink()
    recorded = code.loaded_source()
    assert recorded == {"lib/invented.py": code.EDITED}
    assert code.changed_since(recorded) == ["lib/invented.py"]


def test_a_worker_loads_what_is_excluded() -> None:
    """A move of a file, or an import that goes, would leave a name behind that excludes nothing."""
    for name in ("gpt2.running.launch", "gpt2.training.loop", "lib.kablate"):
        import_module(name)

    files = [vars(module).get("__file__") or "" for module in list(sys.modules.values())]
    loaded = [file.removeprefix(f"{ROOT}/") for file in files]
    excluded = [name for name in loaded if not code.makes_results(name)]
    assert [n for n in code.NOT_TRAINING if not any(e.startswith(n) for e in excluded)] == []
