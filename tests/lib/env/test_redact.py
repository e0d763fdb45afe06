"""Removal of credentials from URLs and variables in program output."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lib.env.options import EnvironmentConfig
from lib.env.packages import current_interpreter
from lib.env.snapshot import redact_secrets, refresh_snapshot


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        (
            "-e git+https://me:s3cret@host/x.git@c0ffee#egg=x",
            "-e git+https://host/x.git@c0ffee#egg=x",
        ),
        ("y @ https://s3cret@host/y.whl", "y @ https://host/y.whl"),
        ("y @ https://me:s3@cret@host/y.whl", "y @ https://host/y.whl"),
        ("z @ git+ssh://git@host/z.git", "z @ git+ssh://git@host/z.git"),
        ("z @ git+ssh://me:s3cret@host/z.git", "z @ git+ssh://me@host/z.git"),
        ("https://conda.host/t/tk-s3cret/label", "https://conda.host/t/<TOKEN>/label"),
        ("mine @ file:///src\n-e git+https://b/c@d", "mine @ file:///src\n-e git+https://b/c@d"),
        ("numpy==2.4.6\n", "numpy==2.4.6\n"),
    ],
)
def test_credentials_of_an_address_are_taken_out(printed: str, kept: str) -> None:
    assert redact_secrets(printed) == kept


@pytest.mark.parametrize(
    "variables",
    [
        "variables:\n  TOKEN: s3cret\n  OTHER: |\n    s3cret\n\n    s3cret\n",
        "variables: {TOKEN: s3cret}\n",
    ],
)
def test_the_variables_of_a_conda_environment_are_taken_out(variables: str) -> None:
    printed = "name: a\ndependencies:\n- python=3.13\n{}prefix: /a\n"
    assert redact_secrets(printed.format(variables)) == printed.format("")


def test_a_snapshot_has_no_password_of_a_remote(
    config: EnvironmentConfig, program: Callable[..., Path], tmp_path: Path
) -> None:
    pip = {"*' freeze'": "-e git+https://me:s3cret@host/x.git#egg=x\n", "*' check'": "fine\n"}
    python = program("python", pip)
    found = current_interpreter(tmp_path, tmp_path, str(python))
    refresh_snapshot(tmp_path / "snapshot", replace(config, policy="venv"), found)
    files = [path for path in (tmp_path / "snapshot").iterdir() if path.is_file()]
    assert (tmp_path / "snapshot/pip_freeze.txt").read_text() == "-e git+https://host/x.git#egg=x\n"
    assert json.loads((tmp_path / "snapshot/snapshot.json").read_text())["files"]
    assert [path.name for path in files if "s3cret" in path.read_text()] == []
