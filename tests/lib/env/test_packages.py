"""Kind and name of an environment, detected from its folder."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from lib.env.packages import Interpreter, current_interpreter
from lib.project import ROOT


def described(prefix: Path, base: Path) -> tuple[str, str]:
    found = current_interpreter(prefix, base)
    return found.kind, found.name


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ("home = /usr/bin\nversion = 3.13.1\n", "venv"),
        ("home = /usr/bin\nimplementation = CPython\nuv = 0.9.8\nversion_info = 3.13.1\n", "uv"),
        # The word in a path is not a key.
        ("home = /opt/uv/bin\ncommand = /opt/uv/bin/python -m venv x\n", "venv"),
    ],
)
def test_virtual_environments(tmp_path: Path, keys: str, kind: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyvenv.cfg").write_text(keys)
    assert described(tmp_path / "mine", Path("/usr")) == (kind, "mine")


def test_conda_and_its_base(conda: Interpreter, tmp_path: Path) -> None:
    assert (conda.kind, conda.name) == ("conda", "llmhe")
    base = tmp_path / "miniconda3"
    (base / "conda-meta").mkdir(parents=True)
    (base / "condabin").mkdir()
    assert described(base, base) == ("conda", "base")


def test_a_virtual_environment_of_conda_s_python_is_no_conda_environment(
    conda: Interpreter, tmp_path: Path
) -> None:
    (tmp_path / "llmhe" / "conda-meta").mkdir(parents=True)
    (tmp_path / "llmhe" / "pyvenv.cfg").write_text(f"home = {conda.prefix}/bin\n")
    assert described(tmp_path / "llmhe", conda.prefix) == ("venv", "llmhe")


def test_a_real_interpreter_is_asked_and_no_variable(tmp_path: Path) -> None:
    venv.create(tmp_path / "real", with_pip=False, symlinks=True)
    code = "from lib.env.packages import current_interpreter; print(current_interpreter())"
    done = subprocess.run(
        [tmp_path / "real" / "bin" / "python", "-c", code],
        cwd=ROOT,
        env={"CONDA_DEFAULT_ENV": "llmhe", "CONDA_PREFIX": str(tmp_path / "llmhe")},
        capture_output=True,
        text=True,
        check=True,
    )
    version = ".".join(map(str, sys.version_info[:3]))
    assert done.stdout == f"venv real, Python {version}\n"


def test_outside_all_of_them_it_is_the_system_s(tmp_path: Path) -> None:
    assert described(tmp_path, tmp_path)[0] == "system"
