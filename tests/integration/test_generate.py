"""Text generation with a finished run from the command line."""

import os
import signal
import subprocess
import sys

from lib.project import ROOT

SCRIPT = "scripts/generate.py"


def test_generates_text_rejects_options_and_is_interrupted(build):
    folder = build(SAMPLE_TOKENS=0, MAX_ITERS=2)
    code, _, stderr = folder.command("scripts/train.py", "--steps", "full")
    assert code == 0, stderr

    prompt = "12 $(x) é"
    code, text, stderr = folder.command(SCRIPT, PROMPT=prompt, RUN="full", TOKENS="24", SEED="2")
    assert code == 0, stderr
    assert text.startswith(prompt) and text.endswith("\n") and len(text) > len(prompt) + 1
    assert "tok/s" in stderr and "tok/s" not in text

    code, text, stderr = folder.command(SCRIPT, "--run", "full", "--top-p", "0")
    assert (code, text) == (2, "") and "TOP_P: " in stderr and "[usage.out-of-range]" in stderr
    assert "Traceback" not in stderr and stderr.endswith("EXIT    code 2\n")

    command = [sys.executable, str(ROOT / SCRIPT), "-O", str(folder.path), "--run", "full"]
    with subprocess.Popen(
        [*command, "--prompt", "12 ", "--tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
    assert begun.startswith(b"12 ") and rest.endswith(b"\n")
    assert process.returncode == 130 and b"interrupted" in stderr and b"Traceback" not in stderr
