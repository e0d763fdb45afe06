"""Writing text with a finished run, as a user types it; details are in tests/gpt2/training."""

import os
import signal
import subprocess
import sys

from lib.project import ROOT

SCRIPT = "scripts/generate.py"


def test_writes_text_refuses_and_is_interrupted(build):
    folder = build(SAMPLE_TOKENS=0, MAX_ITERS=2)
    code, _, said = folder.command("scripts/train.py", "--steps", "full")
    assert code == 0, said

    prompt = "12 $(x) é"
    code, text, said = folder.command(SCRIPT, PROMPT=prompt, RUN="full", TOKENS="24", SEED="2")
    assert code == 0, said
    assert text.startswith(prompt) and text.endswith("\n") and len(text) > len(prompt) + 1
    assert "tok/s" in said and "tok/s" not in text

    code, text, said = folder.command(SCRIPT, "--run", "full", "--top-p", "0")
    assert (code, text) == (2, "") and "TOP_P: 0.0 is not above 0" in said
    assert "Traceback" not in said and said.endswith("EXIT    code 2\n")

    command = [sys.executable, str(ROOT / SCRIPT), "-O", str(folder.path), "--run", "full"]
    with subprocess.Popen(
        [*command, "--prompt", "12 ", "--tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as writing:
        assert writing.stdout is not None
        begun = writing.stdout.read(8)
        writing.send_signal(signal.SIGINT)
        rest, said = writing.communicate(timeout=60)
    assert begun.startswith(b"12 ") and rest.endswith(b"\n")
    assert writing.returncode == 130 and b"interrupted" in said and b"Traceback" not in said
