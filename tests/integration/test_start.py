"""Ctrl-C during the imports of a script."""

import os
import subprocess
import sys

import pytest

from lib.project import ROOT, python_module_command
from tests.build_folder import write_build
from tests.integration.conftest import SMALL

# Fake torch that is interrupted and ignores it.
TORCH = """
import os, signal, time

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException:
    pass
raise ImportError("torch goes on")
"""


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ([], 130, "EXIT    code 130\n"),
        # Like a background job of a shell.
        (["sh", "-c", 'trap "" INT; exec "$@"', "sh"], 3, "torch goes on"),
    ],
)
def test_an_interrupted_import_exits_with_one_line(tmp_path, shell, code, said):
    (tmp_path / "torch.py").write_text(TORCH)
    done = subprocess.run(
        [*shell, *python_module_command("lib.kablate", "validate-machine")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == said if code == 130 else said in done.stderr


def test_after_the_imports_keyboard_interrupt_is_raised(tmp_path):
    text = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import _start
from lib import console

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("saved", flush=True)

console.run_main(main)
"""
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "saved\n", "EXIT    code 130\n")


def test_a_locale_without_the_characters_prints_question_marks(tmp_path):
    write_build(tmp_path, {**SMALL, "TRACKER_RUN_NAME": "Δ of é"})
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [
        *python_module_command("lib.kablate", "why"),
        "TRACKER_RUN_NAME",
        "-O",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ascii_locale},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"? of ?" in done.stdout
