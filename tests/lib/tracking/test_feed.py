"""Records become metrics exactly once each, in order, whatever was interrupted."""

import json
import math
import time

import pytest

from lib.runs.run_dir import RunDir
from lib.tracking.reader import ReadCursor, RecordReader, best_validation_metrics


def train_row(iteration, **changes):
    row = {"kind": "train", "iteration": iteration, "tokens": 8 * iteration}
    return row | {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5} | changes


def eval_row(iteration, loss):
    place = {"kind": "eval", "iteration": iteration, "tokens": 8 * iteration}
    return {**place, "val_loss": loss, "sparsity": 0.25}


def timing(iteration, speed=100.0, **changes):
    row = {"iteration": iteration, "tokens_per_second": speed, "written_at": 100.0 + iteration}
    return row | changes


def sample(ts, mib):
    return {"ts": ts, "rss_mib": mib, "cpu_seconds": 0.0, "gpus": []}


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def append(path, *rows):
    with open(path, "a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def new_metrics(reader):
    """Return the iterations and metric names of all new records."""
    return [(i, set(metrics) - {"iteration"}) for i, metrics in reader.new()]


TRAIN = {"train_loss", "train_perplexity", "learning_rate", "grad_norm"}
EVAL = {"val_loss", "val_perplexity", "sparsity"}
SPEED = {"tokens_per_second"}


def test_no_record_is_sent_twice_while_a_run_continues(run):
    """By one reader, and by one after the other, whose position survives in a file."""
    reader, path = RecordReader(run, ReadCursor()), run.path / "position.json"

    def both():
        position = ReadCursor.read(path)
        found = new_metrics(RecordReader(run, position))
        position.write(path)
        assert found == new_metrics(reader)
        return found

    assert both() == []
    append(run.metrics, train_row(1), train_row(2))
    append(run.timing, timing(2))
    assert both() == [(1, TRAIN), (2, TRAIN | SPEED)]
    assert both() == []
    append(run.metrics, eval_row(2, 3.0), train_row(3))
    assert both() == [(2, EVAL), (3, TRAIN)]


def test_rows_that_a_resumed_run_repeats_are_skipped(run):
    position = ReadCursor()
    rows = [train_row(1), train_row(2), eval_row(2, 3.0), train_row(3), train_row(4)]
    append(run.metrics, *rows)
    append(run.timing, timing(2), timing(4))
    new_metrics(RecordReader(run, position))
    run.metrics.write_text("")
    append(run.metrics, *rows[:3])
    assert new_metrics(RecordReader(run, position)) == []
    append(run.metrics, *rows[3:], train_row(5), train_row(6))
    append(run.timing, timing(4, 90.0), timing(6))
    assert new_metrics(RecordReader(run, position)) == [(5, TRAIN), (6, TRAIN | SPEED)]


def test_a_new_reader_waits_until_the_run_is_where_the_old_one_was(run):
    reader = RecordReader(run, ReadCursor(rows=3, iteration=3))
    append(run.metrics, train_row(1), train_row(2))
    # Trackers reject iterations older than the newest one; a timing waits for its row.
    append(run.timing, timing(2), timing(5))
    assert new_metrics(reader) == []
    append(run.metrics, train_row(3), train_row(4))
    assert new_metrics(reader) == [(4, TRAIN)]
    append(run.metrics, train_row(5))
    assert new_metrics(reader) == [(5, TRAIN | SPEED)]


def test_a_torn_last_line_waits_for_its_end(run):
    reader = RecordReader(run, ReadCursor())
    # An overflowing perplexity and a missing norm are left out.
    append(run.metrics, train_row(1, loss=800.0, grad_norm=None))
    whole = json.dumps(train_row(2)) + "\n"
    for part, expected in (
        (whole[:20], [(1, {"train_loss", "learning_rate"})]),
        (whole[20:], [(2, TRAIN)]),
    ):
        with open(run.metrics, "a") as stream:
            stream.write(part)
        assert new_metrics(reader) == expected


def test_the_best_validation_is_the_lowest_not_the_last(run):
    append(run.metrics, eval_row(1, 3.0), train_row(2), eval_row(2, 2.5), eval_row(3, 2.75))
    expected = {"final/best_val_loss": 2.5, "final/best_val_perplexity": math.exp(2.5)}
    assert best_validation_metrics(run) == expected


def test_samples_of_the_machine_belong_to_the_log_interval_they_fell_into(run):
    append(run.metrics, *(train_row(i) for i in range(1, 5)))
    append(run.timing, timing(2), timing(4))
    # Written at 102 and 104.
    append(run.telemetry, sample(101.0, 1024), sample(102.0, 3072), sample(103.5, 5120))
    found = [metrics.get("process/rss_gb") for _, metrics in RecordReader(run, ReadCursor()).new()]
    assert found == [None, 2.0, None, 5.0]


@pytest.mark.parametrize("late", [False, True], ids=["with its row", "after its row"])
def test_a_timing_waits_until_the_samples_before_it_are_written(run, late):
    position = ReadCursor()
    reader, now = RecordReader(run, position), time.time()
    append(run.metrics, train_row(1), train_row(2))
    if late:
        assert [i for i, _ in reader.new(ended=False)] == [1, 2]
    append(run.timing, timing(2, written_at=now))
    assert [i for i, _ in reader.new(ended=False)] == ([] if late else [1])
    append(run.telemetry, sample(now - 0.1, 1024))
    append(run.metrics, train_row(3))
    found = dict(reader.new())
    assert list(found) == [2, 3] and position.timed == 2
    assert (found[2]["process/rss_gb"], found[2]["tokens_per_second"]) == (1.0, 100.0)
