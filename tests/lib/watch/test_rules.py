"""Each rule fires on what it is for, and is quiet on a run that is well."""

from collections.abc import Callable
from typing import Any

import pytest

from lib.status import State, Status
from lib.watch.facts import Facts
from lib.watch.options import WatchOptions
from lib.watch.rules import RULES, alarms

NOW = 10_000.0
OPTIONS = WatchOptions(
    stall_seconds=180,
    plateau_iterations=10,
    speed_percent=10,
    memory_percent=10,
    gate_entropy=0.5,
    gate_max=0.9,
)


def well(**changes: Any) -> Facts:
    """Twelve heartbeats of a run at work, the newest ten seconds ago, and a loss that falls."""
    beats = [
        {
            "ts": NOW - 10 * (12 - i),
            "toks_per_s": (100.0 if i < 2 else 1000.0) + i,
            "mem_reserved_mib": 4000.0 if i else 500.0,
            "fallbacks": 1,
            "gate_entropy": 0.9,
            "gate_max": 0.5,
        }
        for i in range(12)
    ]
    train = [{"loss": 5.0 - 0.01 * i, "grad_norm": 0.4} for i in range(40)]
    facts = {
        "status": Status(State.RUNNING, 0, "", 40, 100),
        "now": NOW,
        "heartbeats": {0: beats, 1: [dict(beat) for beat in beats]},
        "train": train,
        "evals": [],
    }
    return Facts(**(facts | changes))


def with_newest(**changes: Any) -> Facts:
    facts = well()
    facts.heartbeats[0][-1].update(changes)
    return facts


def one_silent_rank() -> Facts:
    facts = well()
    for beat in facts.heartbeats[1]:
        beat["ts"] -= 200
    return facts


def flat_loss() -> Facts:
    return well(train=[{"loss": 3.0 + 0.001 * (i % 2), "grad_norm": 1.0} for i in range(20)])


def growing_memory() -> Facts:
    facts = well()
    for i, beat in enumerate(facts.heartbeats[1]):
        beat["mem_reserved_mib"] = 4000.0 + 100 * i
    return facts


CASES: dict[str, tuple[Callable[[], Facts], str]] = {
    "stall": (one_silent_rank, "no heartbeat of rank 1 for 03:30"),
    "zero-throughput": (lambda: with_newest(toks_per_s=0.0), "0 tokens per second"),
    "plateau": (flat_loss, "mean loss of the last 10 iterations 3.0005, of those before 3.0005"),
    "throughput": (lambda: with_newest(toks_per_s=850.0), "850 tok/s, -15 % against the median"),
    "memory-creep": (growing_memory, "rank 1 holds 5,000 MiB, 4,400 near its start"),
    "zero-gradient": (
        lambda: well(train=[{"loss": 5.0, "grad_norm": 1.0}, {"loss": 5.0, "grad_norm": 0.0}]),
        "the gradient is 0",
    ),
    "fallbacks": (lambda: with_newest(fallbacks=7), "7 fallbacks, 1 at the start"),
    "gate-entropy": (lambda: with_newest(gate_entropy=0.31), "0.310 nats, less than 0.5"),
    "gate-max": (lambda: with_newest(gate_max=0.95), "0.950, more than 0.9"),
}


def test_a_run_that_is_well_raises_no_alarm() -> None:
    assert alarms(well(), OPTIONS) == {}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_nothing_else_does(name: str) -> None:
    build, expected = CASES[name]
    said = alarms(build(), OPTIONS)
    assert list(said) == [name]
    assert expected in said[name]


def test_a_run_that_is_over_does_not_stall() -> None:
    facts = one_silent_rank()
    over = Status(State.SUCCESS, 0, "", 100, 100)
    assert alarms(Facts(**(vars(facts) | {"status": over})), OPTIONS) == {}


def test_a_run_that_has_not_begun_raises_no_alarm() -> None:
    assert alarms(well(status=None, heartbeats={}, train=[]), OPTIONS) == {}


def test_the_end_of_a_run_that_is_over_is_not_judged_by_its_speed() -> None:
    build, _ = CASES["throughput"]
    over = Status(State.SUCCESS, 0, "", 100, 100)
    assert alarms(Facts(**(vars(build()) | {"status": over})), OPTIONS) == {}
