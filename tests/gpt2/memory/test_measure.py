"""Predicted memory against a real process."""

import sys

import pytest

from gpt2.memory import measure


def test_a_real_training_process_uses_the_predicted_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """GPT-2 124M, one sequence of 64 tokens, two steps, in a process of its own."""
    monkeypatch.setattr(sys, "argv", ["measure", "b1-t64-fp32"])
    measure.main()
    printed = capsys.readouterr().out
    case, _predicted, real, ratio = printed.splitlines()[-1].split()
    assert case == "b1-t64-fp32"
    # At least weights, gradients and two moments.
    assert float(real) > 4 * 4 * 123.7e6 / 2**30
    assert 0.88 < float(ratio) < 1.12, printed
