"""An error says whose it is: the checked code's, or the check's own."""

from types import SimpleNamespace

import torch

from gpt2.check import causal
from gpt2.check.partner import Outcome


def test_an_error_in_a_line_of_the_check_is_its_own():
    with Outcome() as outcome:
        causal.check(SimpleNamespace())
    assert outcome.text.startswith("the check itself fails: AttributeError:")
    assert "causal.py" in outcome.text


def test_an_error_anywhere_else_is_the_checked_codes():
    with Outcome() as outcome:
        torch.nn.Linear(2, 3)(torch.zeros(3))
    assert outcome.text.startswith("the checked code raises: RuntimeError:")
