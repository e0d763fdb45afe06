"""Text generation with a finished run from the command line."""

import signal
import time

from tests.integration.conftest import IN_PROCESS, STEP

SCRIPT = "generate"


def test_generates_text_rejects_options_and_is_interrupted(build):
    folder = build(SAMPLE_TOKENS=0, MAX_ITERS=2)
    code, _, stderr = folder.command(*IN_PROCESS, STEP, "full")
    assert code == 0, stderr

    prompt = "12 $(x) é"
    code, text, stderr = folder.command(SCRIPT, PROMPT=prompt, RUN="full", TOKENS="24", SEED="2")
    assert code == 0, stderr
    assert text.startswith(prompt) and text.endswith("\n") and len(text) > len(prompt) + 1
    assert "tok/s" in stderr and "tok/s" not in text

    code, text, stderr = folder.command(SCRIPT, "--run", "full", "--top-p", "0")
    assert (code, text) == (2, "") and "TOP_P: " in stderr and "[usage.out-of-range]" in stderr
    assert "Traceback" not in stderr and stderr.endswith("EXIT    code 2\n")

    words = ("--run", "full", "--prompt", "12 ", "--tokens", "1000000")
    process = folder.start(SCRIPT, *words)
    deadline = time.monotonic() + 60
    while len(process.stdout) < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stdout.startswith("12 ") and process.stdout.endswith("\n")
    assert "interrupted" in process.stderr and "Traceback" not in process.stderr
