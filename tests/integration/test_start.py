"""What a script says while its modules are still being read."""

import os
import signal
import subprocess
import sys

import pytest

from lib.project import ROOT


@pytest.mark.parametrize(
    "torch, said, code",
    [
        ("raise KeyboardInterrupt\n", "EXIT    code 130\n", -signal.SIGINT),
        ("raise ImportError('no torch here')\n", "ImportError: no torch here\n", 1),
    ],
)
def test_ctrl_c_is_one_line_and_a_defect_is_not(tmp_path, torch, said, code) -> None:
    (tmp_path / "torch.py").write_text(torch)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/needle.py")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(said)
    assert ("Traceback" in done.stderr) == (code == 1)
    assert code == 1 or done.stderr == said
