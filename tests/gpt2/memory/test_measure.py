"""Predicted memory against a real process."""

import subprocess
import sys

from lib.project import ROOT


def test_a_real_training_process_uses_the_predicted_memory() -> None:
    """GPT-2 124M, one sequence of 64 tokens, two steps."""
    command = [sys.executable, "-m", "gpt2.memory.measure", "b1-t64-fp32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    case, _predicted, real, ratio = done.stdout.splitlines()[-1].split()
    assert case == "b1-t64-fp32"
    # At least weights, gradients and two moments.
    assert float(real) > 4 * 4 * 123.7e6 / 2**30
    assert 0.88 < float(ratio) < 1.12, done.stdout
