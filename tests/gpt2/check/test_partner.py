"""The second process; an error says whose it is: the checked code's, or the check's own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2.check import causal, parallel
from gpt2.check.cases import checked_layers, find_cases
from gpt2.check.partner import Outcome, Partner
from gpt2.check.subject import Subject
from gpt2.check.workshop import Workshop
from lib.errors import RunError


def test_an_error_in_a_line_of_the_check_is_its_own():
    with Outcome() as outcome:
        causal.check(SimpleNamespace())
    assert outcome.text.startswith("the check itself fails: AttributeError:")
    assert "causal.py" in outcome.text


def test_an_error_anywhere_else_is_the_checked_codes():
    with Outcome() as outcome:
        torch.nn.Linear(2, 3)(torch.zeros(3))
    assert outcome.text.startswith("the checked code raises: RuntimeError:")


def test_a_result_that_nobody_took_is_not_the_next_ones():
    partner = Partner()
    partner.start("builtins:abs", -1)
    assert partner.call("builtins:abs", -2) == 2
    with pytest.raises(RunError, match="TypeError"):
        partner.call("builtins:abs", "x")
    assert partner.call("builtins:abs", -3) == 3
    partner.close()


def test_nobody_to_answer_is_no_error(capfd):
    partner = Partner()
    partner.start("time:sleep", 0.2)
    partner._pipe.close()
    partner._process.join(10.0)
    assert (partner._process.exitcode, capfd.readouterr().err) == (0, "")


def test_a_process_that_died_is_told():
    partner = Partner()
    with pytest.raises(RunError, match="the second process died"):
        partner.call("os:_exit", 1)
    with pytest.raises(RunError, match="the second process died"):
        partner.call("builtins:abs", -1)
    partner.close()


def test_a_step_that_fails_in_two_processes_leaves_the_next_one_its_own(monkeypatch):
    """Rank 0 raises where rank 1 waits for its gradients."""
    first, *_, second = find_cases(checked_layers(Path(), "gpt2-ratio-ablation"), "0-2").chosen
    right = parallel.train

    def train(rank, config, meeting, rows):
        fails = not rank and config.identity() == Subject(first, workshop).exact.identity()
        return right(rank, config, meeting, "x" if fails else rows)

    monkeypatch.setattr(parallel, "train", train)
    with Workshop() as workshop:
        with pytest.raises(TypeError):
            parallel.check(Subject(first, workshop))
        assert parallel.check(Subject(second, workshop)) == []
