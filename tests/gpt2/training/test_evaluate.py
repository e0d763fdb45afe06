"""Calibration of a model that is sure of its answers."""

from collections import defaultdict

import pytest
import torch

from gpt2.data.evaluation_windows import evaluation_windows
from lib.runs.documents import expected_calibration_error


def test_the_calibration_error_agrees_with_a_plain_loop(session):
    """Over |acc - conf| of 15 bins; sure answers, some of them wrong, fill the upper bins too."""
    opened = session()
    with torch.no_grad():
        opened.model.wte.weight.mul_(60)
    calibration = opened.evaluate(opened.model).calibration
    split, model = opened.dataset.val, opened.model.eval()
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for window in evaluation_windows(split, 16, opened.config.data.eval_tokens):
        tokens = torch.from_numpy(split.window(window.offset, window.length).astype("int64"))
        with torch.no_grad():
            probabilities = torch.softmax(model(tokens[None, :-1])[0].double(), -1)
        for p_V, right in zip(probabilities, tokens[1:], strict=True):
            place = next(m for m in range(15) if p_V.max() <= (m + 1) / 15 or m == 14)
            bins[place].append((float(p_V.max()), bool(p_V.argmax() == right)))
    assert len(bins) > 5
    n = sum(map(len, bins.values()))
    gaps = [abs(sum(hit - p for p, hit in found)) / n for found in bins.values()]
    assert expected_calibration_error(calibration) == pytest.approx(sum(gaps), rel=1e-4)
    assert calibration["n_tokens"] == [len(bins[m]) for m in range(15)]
    assert calibration["n_correct"] == [sum(hit for _, hit in bins[m]) for m in range(15)]
