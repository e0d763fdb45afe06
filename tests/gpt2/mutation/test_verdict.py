"""A fault that only changes rounding is equivalent; a small fault of a formula is not."""

import pytest

from gpt2 import model
from gpt2.mutation import trial
from gpt2.mutation.cases import TrialCase
from gpt2.mutation.trial import exact_losses
from gpt2.mutation.verdict import are_equal_losses

pytestmark = pytest.mark.usefixtures("torch_as_before")


@pytest.fixture
def losses(monkeypatch):
    """Return a function that trains with another loss function and returns the losses."""
    right = model.linear_cross_entropy
    monkeypatch.setattr(trial, "_SHAPES", trial._SHAPES[:1])

    def train(change):
        monkeypatch.setattr(model, "linear_cross_entropy", lambda *given: change(right, *given))
        return exact_losses([TrialCase("gpt2-ratio-small", "baseline")])

    return train


def test_another_order_of_a_product_is_rounding_and_a_millionth_of_the_loss_is_not(losses):
    before = losses(lambda right, *given: right(*given))
    reordered = losses(lambda right, x, w, *rest: right(x / 3, w * 3, *rest))
    assert are_equal_losses(reordered, before)
    larger = losses(lambda right, *given: right(*given) * (1 + 1e-6))
    assert not are_equal_losses(larger, before)


def test_a_run_without_losses_is_equal_to_none():
    assert not are_equal_losses({"a": [[]]}, {"a": [[]]})
    assert not are_equal_losses({"a": [[]]}, {"a": [[2.0]]})
    assert are_equal_losses({"a": [[2.0]]}, {"a": [[2.0 + 1e-10]]})
