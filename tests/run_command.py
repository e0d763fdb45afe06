"""Commands of kablate that run in the process of a test."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from lib.kablate import main


def run_command(*words: str) -> tuple[int, str, str]:
    """Run a command with its words; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(*words)
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()
