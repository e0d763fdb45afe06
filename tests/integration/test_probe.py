"""make plan PROBE=1: measured steps in the plan, and Ctrl-C."""

import json
import signal
import time
from pathlib import Path


def test_the_plan_has_measured_steps(build):
    folder = build(EVAL_INTERVAL=2)
    python = folder.server.interpreter()
    words = ("--steps", "0,5", "--probe", "--json")
    plan = folder.start("plan", *words, python=python)
    assert plan.wait() == 0, plan.stderr
    assert "1/2" in plan.stderr and "2/2" in plan.stderr
    for run in json.loads(plan.stdout)["runs"]:
        probe = run["probe"]
        assert run["seconds_from"] == "probe" and run["evaluations"] == 2
        # Two micro-batches, four steps.
        assert probe["timed_micro_batches"] == 2 and probe["step_seconds"] > 0
        expected = 4 * probe["step_seconds"] + 2 * probe["evaluation_seconds"]
        assert abs(run["seconds"] - expected) < 1e-9


def probes(folder: Path) -> list[str]:
    """Return the processes that time steps for the build folder."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_text().split("\0")
        except OSError:
            continue
        if "gpt2.running.probe" in words and str(folder) in words:
            commands.append(str(entry))
    return commands


def test_ctrl_c_ends_the_probe(build):
    folder = build()
    plan = folder.start("plan", "--probe")
    deadline = time.monotonic() + 60
    while not probes(folder.path):
        assert plan.poll() is None and time.monotonic() < deadline, plan.stderr
        time.sleep(0.02)
    plan.signal(signal.SIGINT)
    assert plan.wait(60) == 130 and "Traceback" not in plan.stderr, plan.stderr
    assert plan.processes() == probes(folder.path) == []
