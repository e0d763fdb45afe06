"""MFU is the model's FLOPs over the devices' peak, and null if the peak is unknown."""

import itertools
from unittest import mock

import pytest
import torch

from gpt2.config import Config
from gpt2.training.metrics import peak_flops
from lib.tracking.reader import ReadCursor, RecordReader
from tests.json_rows import read_rows


def matrix_flops(config: Config) -> float:
    """Return FLOPs of one token's forward and backward, counted by hand for two dense blocks."""
    c, t, vocabulary = 16, 16, config.model.shape.padded_vocab_size
    of_a_block = 2 * (3 * c * c + c * c + 8 * c * c) + 4 * c * (t + 1) / 2
    return 3 * (2 * of_a_block + 2 * c * vocabulary)


def test_speed_and_mfu_of_a_line_are_those_of_its_interval(configure, train):
    done = train(configure(PEAK_TFLOPS="0.25"))
    rows = [*read_rows(done.files.timing)]
    flops = matrix_flops(configure())
    start = {"iteration": 0, "train_seconds": 0.0}
    for before, row in itertools.pairwise([start, *rows]):
        iterations = row["iteration"] - before["iteration"]
        tokens = iterations * configure().train.tokens_per_iteration(16)
        seconds = row["train_seconds"] - before["train_seconds"]
        assert row["tokens_per_second"] * seconds == pytest.approx(tokens)
        assert row["mfu"] == pytest.approx(flops * row["tokens_per_second"] / 0.25e12)
    assert "% MFU)" in done.files.logs.read_text()
    told = dict(RecordReader(done.files, ReadCursor()).new())
    assert [told[row["iteration"]]["mfu"] for row in rows] == [row["mfu"] for row in rows]


def test_a_cpu_has_no_mfu_and_one_line_reports_it(trained):
    done = trained
    assert {row["mfu"] for row in read_rows(done.files.timing)} == {None}
    (line,) = [text for text in done.files.logs.read_text().splitlines() if "MFU" in text]
    assert "fp32" in line and "PEAK_TFLOPS" in line
    assert not any("mfu" in metrics for _, metrics in RecordReader(done.files, ReadCursor()).new())


def test_all_devices_of_a_run_count(session):
    opened = session()
    opened.device = torch.device("cuda")
    with (
        mock.patch("gpt2.training.metrics.device_name", return_value="NVIDIA A100-SXM4-80GB"),
        mock.patch.object(type(opened.group), "size", 4),
    ):
        assert peak_flops(opened) == 4 * 19.5e12
