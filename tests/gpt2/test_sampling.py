"""Sampling of a token, against the definitions in plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.generate import SamplingOptions, generate
from gpt2.model import GPT
from lib.env.options import MachineConfig
from lib.errors import ConfigError
from tests.gpt2.builders import make_model_config


def naive(logits: list[float], sampling: SamplingOptions) -> list[float]:
    """Apply temperature, then top-k, then the smallest set that reaches p."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    topk = order[: sampling.top_k or None]
    total = sum(weights[i] for i in topk)
    nucleus, reached = [], 0.0
    for i in topk:
        if reached >= sampling.top_p and sampling.top_p < 1:
            break
        nucleus.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@given(
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, 100]),
    st.sampled_from([0.01, 0.5, 0.93, 1.0]),
    st.integers(0, 99),
)
@settings(max_examples=100)
def test_the_distribution_is_as_defined(temperature, top_k, top_p, seed):
    sampling = SamplingOptions(temperature, top_k, top_p)
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 2
    expected = torch.tensor(naive(logits_V.tolist(), sampling))
    torch.testing.assert_close(sampling.distribution(logits_V), expected, rtol=1e-4, atol=1e-6)


def test_ties_zero_temperature_and_defaults():
    probabilities = SamplingOptions(top_k=2).distribution(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert probabilities.tolist() == [0.0, 0.5, 0.5, 0.0]
    logits_V = torch.randn(300) * 5
    assert torch.equal(SamplingOptions().distribution(logits_V), torch.softmax(logits_V, -1))
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.tensor([0.1, 3.0, 2.9, -1.0])
    for temperature in (0.0, 1e-6, 1e-300):
        assert SamplingOptions(temperature).draw(logits_V, generator) == 1
    # A token of probability 0.5 is missed once in 2^60.
    logits_V = torch.tensor([0.0, 0.0, -9.0])
    assert {SamplingOptions(top_k=2).draw(logits_V, generator) for _ in range(60)} == {0, 1}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, math.nan, math.inf)),
        ("top_p", (0.0, 1.01, math.nan)),
        ("top_k", (-1,)),
    ],
)
def test_out_of_range_values_are_rejected(name, values):
    for value in values:
        with pytest.raises(ConfigError) as error:
            SamplingOptions(**{name: value})
        assert [problem.where for problem in error.value.problems] == [name.upper()]
        assert error.value.codes == ["usage.out-of-range"]


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_model_in_its_mode(training):
    machine = MachineConfig("cpu", "fp32", 1, False, True, "highest", False, False, 0, "ddp", False)
    model = GPT(make_model_config()).train(training)
    model.init_weights(1)
    tokens = generate(model, torch.zeros(3, dtype=torch.long), 1, machine)
    next(tokens)
    assert model.training is training
    model.ln_f.register_forward_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(tokens)
    assert model.training is training
