"""Kind and name of an environment, detected from its folder."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from lib.env.packages import current_interpreter
from lib.project import ROOT


@pytest.mark.parametrize(
    ("files", "base", "expected"),
    [
        ({"pyvenv.cfg": "home = /usr/bin\nversion = 3.13.1\n"}, "/usr", ("venv", "mine")),
        ({"pyvenv.cfg": "implementation = CPython\nuv = 0.9.8\n"}, "/usr", ("uv", "mine")),
        # The word in a path is not a key.
        ({"pyvenv.cfg": "home = /opt/uv/bin\ncommand = /opt/uv/x\n"}, "/usr", ("venv", "mine")),
        ({"conda-meta/history": ""}, None, ("conda", "mine")),
        ({"conda-meta/history": "", "condabin/conda": ""}, None, ("conda", "base")),
        # A virtual environment of conda's Python.
        ({"conda-meta/history": "", "pyvenv.cfg": "home = /envs/x\n"}, "/envs", ("venv", "mine")),
        ({}, None, ("system", "mine")),
    ],
)
def test_kinds_of_environments(tmp_path, files, base, expected):
    prefix = tmp_path / "mine"
    prefix.mkdir()
    for name, text in files.items():
        (prefix / name).parent.mkdir(exist_ok=True)
        (prefix / name).write_text(text)
    found = current_interpreter(prefix, Path(base) if base else prefix)
    assert (found.kind, found.name) == expected


def test_a_real_interpreter_is_asked_and_no_variable(tmp_path):
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
