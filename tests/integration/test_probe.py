"""make plan PROBE=1: measured steps in the plan, and Ctrl-C."""

import json
import signal
import time

import pytest

from tests.integration.conftest import SINGLE

RANKS = {"GPUS": 2, "BATCH_SIZE": 1, "DATA_PARALLEL_FSDP": True}


@pytest.mark.parametrize("settings", [{}, RANKS], ids=["one process", "two ranks"])
def test_the_plan_has_measured_steps(build, settings):
    folder = build(**SINGLE, EVAL_INTERVAL=2, **settings)
    plan = folder.start("plan", "--probe", "--json", python=folder.server.interpreter())
    assert plan.wait() == 0, plan.stderr
    (run,) = json.loads(plan.stdout)["runs"]
    probe = run["probe"]
    assert run["seconds_from"] == "probe" and run["evaluations"] == 2
    # Two micro-batches, four steps.
    assert probe["timed_micro_batches"] == 2 and 0 < probe["step_seconds"] < 60
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
