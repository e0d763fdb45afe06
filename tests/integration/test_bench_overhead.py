"""Sides of the overhead benchmark, and its arithmetic. No test asserts an overhead."""

import json
import time
from math import comb

import pytest

from gpt2.bench import settings, settings_worker
from gpt2.bench.settings import WARMUP_ITERATIONS, OverheadFigures
from gpt2.planning.plan import config_layers
from lib.config.tree import KconfigTree
from lib.report.significance import median_interval
from tests.integration.conftest import SINGLE


def asked(folder, iterations=2):
    return settings.comparisons(KconfigTree(), config_layers(folder), iterations)


def test_sides_differ_in_records_and_trackers_alone(build):
    machinery, trackers = asked(build(**SINGLE, TELEMETRY_INTERVAL=10).path, 7)
    assert machinery.on.config is machinery.off.config
    assert (machinery.on.loop, machinery.off.loop) == ("recorded", "bare")
    assert trackers.on.config.hash8 == trackers.off.config.hash8
    assert trackers.on.loop == trackers.off.loop == "recorded"
    names = {tracker.name for tracker in trackers.on.config.tracking.trackers}
    assert names == {"tracker_wandb", "tracker_trackio", "tracker_tensorboard"}
    assert trackers.off.config.tracking.trackers == ()
    # The finiteness checks of the paper profile are part of the measured overhead.
    assert machinery.on.config.numerics.flags["check_numerics"]
    assert machinery.on.config.telemetry.interval_seconds
    assert machinery.on.config.train.max_iters == WARMUP_ITERATIONS + 7


@pytest.mark.parametrize("symbols", [{}, {"PRUNING_MAGNITUDE": True, "OPTIMIZER_ADAMWSPAM": True}])
def test_the_bare_loop_trains_the_same_weights_and_keeps_nothing(build, tmp_path, symbols):
    folder = build(**SINGLE, **symbols).path
    config = asked(folder)[0].on.config
    weights = set()
    for name, loop in (
        ("recorded", settings_worker.time_recorded),
        ("bare", settings_worker.time_bare),
    ):
        path = tmp_path / "scratch" / name
        path.mkdir(parents=True)
        figures = loop(config, folder, path, settings_worker.IterationTimer(config, time.time()))
        weights.add(figures.weights)
        assert figures.seconds > 0 and figures.cpu_seconds > 0 and figures.start_up_seconds > 0
        files = {file.name for file in path.iterdir()}
        assert files >= {"manifest.json", "metrics.jsonl"} if name == "recorded" else files == set()
    assert len(weights) == 1


def test_a_side_is_timed_in_a_process_of_its_own(build, forked_modules):
    folder = build(**SINGLE).path
    figures = settings.train_side(asked(folder)[0].off, folder)
    assert figures.start_up_seconds > figures.seconds > 0
    assert list(folder.glob("overhead-*")) == []


def test_whole_iterations_are_counted_after_the_first_few(build, monkeypatch):
    config = asked(build(**SINGLE).path, 2)[0].on.config
    wall, processor = iter([10, 20, 30, 40, 45, 52, 99]), iter(range(7))
    monkeypatch.setattr(settings_worker.time, "time", lambda: float(next(wall)))
    monkeypatch.setattr(settings_worker.time, "process_time", lambda: float(next(processor)))
    heads = settings_worker.IterationTimer(config, 4.0)
    assert not any(heads() for _ in range(9))
    assert heads.figures("w") == OverheadFigures(12.0, 2.0, 6.0, "w")


def test_pairs_change_their_order_and_keep_their_ratio(build):
    order = []

    def train(side):
        order.append(side.name)
        seconds = 1.0 + 0.1 * (side.name != "the bare loop") + 0.1 * ("three" in side.name)
        return OverheadFigures(seconds, 2 * seconds, 5.0, "w")

    every = asked(build(**SINGLE).path)
    machinery, trackers = answers = settings.measure_overhead(every, 2, train)
    on, off, tracked = "the trainer", "the bare loop", "with three trackers"
    assert order == [on, tracked, off, on, on, off, tracked, on]
    assert machinery.ratios("seconds") == pytest.approx([1.1, 1.1])
    assert trackers.ratios("cpu_seconds") == pytest.approx([1.2 / 1.1] * 2)
    document = json.loads(settings.overhead_to_json(answers, 2))["questions"]["machinery"]
    assert document["same_weights"]
    assert document["seconds_ratio"]["median"] == pytest.approx(1.1)
    text = settings.overhead_to_text(answers, 2)
    assert "500.0 ms" in text and "+10.00 %" in text and "5.0 against 5.0 s" in text


@pytest.mark.parametrize(("n", "k"), [(5, 1), (6, 1), (8, 1), (9, 2), (15, 4), (20, 6)])
def test_the_interval_of_a_median_is_the_textbook_s(n, k):
    """Check the k-th value from either end, as in 95 % tables of the sign test."""
    values = [float(i) for i in range(n, 0, -1)]
    found = median_interval(values)
    assert (found.low, found.high) == (k, n + 1 - k)
    assert found.coverage == pytest.approx(1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n)
