"""make plan PROBE=1: measured steps in the plan, and Ctrl-C."""

import json
import signal
import time


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


def test_ctrl_c_ends_the_probe(build):
    folder = build()
    plan = folder.start("plan", "--probe")
    deadline = time.monotonic() + 60
    # The command, the server of the workers and its tracker, and a worker.
    while len(plan.processes()) < 4:
        assert plan.poll() is None and time.monotonic() < deadline, plan.stderr
        time.sleep(0.02)
    plan.signal(signal.SIGINT)
    assert plan.wait(60) == 130 and "Traceback" not in plan.stderr, plan.stderr
    while plan.processes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
