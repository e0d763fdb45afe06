"""Health check of a run's first steps: every criterion, and no effect on results."""

import math
from dataclasses import replace

import pytest

from gpt2.training import first_steps
from gpt2.training.first_steps import criteria_text, evaluate_criteria, failed_criteria
from lib.runs.rows import HeartbeatRow, TrainRow
from lib.tracking.stability import UnstableStep
from lib.tracking.watch import WatchedRecords

GOOD = [5.6 - 0.1 * i for i in range(20)]
NORMS = [1.0] * 20
STEADY = [10.0, 50.0, 100.0, 101.0, 99.0, 100.0, 120.0]
RISING = [3.0 + 0.01 * i for i in range(20)]
TRAINED = {"init": "run:base"}


@pytest.fixture
def verdict(configure):
    """Return a function that judges 20 steps, with a heartbeat for each two of them."""

    def give(losses=GOOD, norms=NORMS, speeds=STEADY, mebibytes=(), unstable=(), init="", **gates):
        rows = [
            TrainRow(iteration=i, tokens=8 * i, loss=loss, lr=0.1, grad_norm=norm)
            for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
        ]
        beats = [
            HeartbeatRow(ts=0.0, step=2 * i, mem_reserved_mib=1.0, toks_per_s=speed)
            for i, speed in enumerate(speeds, 1)
        ]
        if gates:
            beats.append(HeartbeatRow(ts=0.0, step=2 * len(speeds), mem_reserved_mib=1.0, **gates))
        for at, value in enumerate(mebibytes):
            beats[at] = replace(beats[at], mem_reserved_mib=value)
        facts = WatchedRecords(None, 0.0, {0: beats}, rows, (), unstable)
        return evaluate_criteria(facts, configure(INIT_FROM=init), 20)

    return give


def test_a_healthy_start_passes(verdict):
    found = verdict(gate_entropy=1.0, gate_max=0.4)
    names = ["loss", "stability", "gradients", "gates", "speed", "memory"]
    assert not failed_criteria(found) and list(found) == names
    text = criteria_text(20, found)
    assert text.startswith("first 20 it ")
    values = ["5.550 to 3.750", f"{math.log(257):.3f}", "1.000 to 1.000 of 20"]
    values.append("20 % off the median of 100 tok/s")
    assert [value for value in values if value not in text] == []


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        # Decreases, but is above uniform guessing.
        ({"losses": [7.0 - 0.01 * i for i in range(20)]}, "loss"),
        # Below uniform guessing from the first step on, but increases.
        ({"losses": RISING}, "loss"),
        ({"losses": [*GOOD[:19], math.inf]}, "loss"),
        # Trained weights may start at a lower loss, which the warm-up raises.
        ({**TRAINED, "losses": [5.0 + 0.1 * i for i in range(20)]}, "loss"),
        ({**TRAINED, "losses": [*[3.0] * 19, math.nan]}, "loss"),
        ({"norms": [*NORMS[:10], 0.0, *NORMS[:9]]}, "gradients"),
        ({"norms": [None] * 10 + NORMS[:10]}, "gradients"),
        ({"norms": [None] * 20}, "gradients"),
        ({"gate_entropy": 0.49, "gate_max": 0.5}, "gates"),
        ({"gate_entropy": 0.6, "gate_max": 0.91}, "gates"),
        ({"unstable": [UnstableStep(20, 9.0, "loss 3 to 9")]}, "stability"),
        ({"speeds": [100.0] * 9, "mebibytes": [1.0] * 5 + [2.0] * 4}, "memory"),
    ],
)
def test_each_criterion_fails_alone(verdict, given, wrong):
    found = verdict(**given)
    assert failed_criteria(found) == [name for name in found if not found[name][0]] == [wrong]
    shown = criteria_text(20, found)
    assert shown.startswith("first 20 it ") and shown.endswith(found[wrong][1])
    assert [name for name, (_, text) in found.items() if text in shown] == [wrong]


@pytest.mark.parametrize("last", [126.0, 74.0])
def test_a_speed_that_other_programs_change_is_a_note(verdict, last):
    found = verdict(speeds=[*STEADY[:6], last])
    assert not failed_criteria(found) and not found["speed"][0]
    shown = criteria_text(20, found)
    assert "passed" in shown and "failed" not in shown
    assert shown.endswith(f"{found['speed'][1]}, as if other programs ran")
    both = verdict(speeds=[*STEADY[:6], last], norms=[None] * 20)
    assert criteria_text(20, both).endswith("failed: no gradient norms")


def test_criteria_without_data_are_absent(verdict):
    assert list(verdict(speeds=STEADY[:6])) == ["loss", "stability", "gradients"]
    assert failed_criteria(verdict(RISING, **TRAINED)) == []
    # Later steps are ignored.
    later = verdict([*GOOD, 9.0], [*NORMS, 0.0], [*STEADY, 100.0, 100.0, 100.0, 9.0])
    jump = verdict(unstable=[UnstableStep(21, 9.0, "loss 3 to 9")])
    assert failed_criteria(later) == failed_criteria(jump) == []


@pytest.mark.parametrize("stop_at", [8, 9])
def test_the_result_is_logged_once_and_stored(configure, train, stop_at):
    config = configure(FIRST_STEPS=8)
    train(config, stop_at=stop_at)
    done = train(config)
    lines = done.files.logs.read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines) if "first 8 it" in line)
    kept = done.summary()["timing"]["first_steps"]
    assert kept["steps"] == 8 and list(kept["criteria"]) == ["gradients", "loss", "stability"]
    assert kept["criteria"]["loss"]["found"] in lines[at]
    # The log line after the eighth step, which is the third of four.
    assert "it 9/12" in lines[at - 1]


@pytest.mark.parametrize(
    ("failed", "tag", "shown"),
    [
        ((), "FIRST", False),
        (("speed",), "FIRST", False),
        # Shown when it happened.
        (("stability",), "WARN", False),
        (("loss", "stability"), "WARN", True),
    ],
)
def test_only_failures_that_were_not_shown_are_shown(session, monkeypatch, failed, tag, shown):
    criteria = {name: (name not in failed, name) for name in ("loss", "stability", "speed")}
    monkeypatch.setattr(first_steps, "check_first_steps", lambda session: criteria)
    opened, events = session(FIRST_STEPS=1), []
    assert first_steps.summary_of_first_steps(opened) is None
    opened.iteration = 3
    monkeypatch.setattr(opened.records, "_report", events.append)
    first_steps.log_health_check(opened)
    assert f" {tag} " in opened.run.logs.read_text()
    assert [event["tag"] for event in events] == ["WARN"] * shown
    summary = first_steps.summary_of_first_steps(opened)
    assert summary and (summary["steps"], summary["passed"]) == (1, tag == "FIRST")
