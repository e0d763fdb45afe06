"""Text samples."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from gpt2 import generate as module
from gpt2.generate import SamplingOptions, generate
from gpt2.training.rng import rng_state
from gpt2.training.state import TrainingSession

PROMPT = [1, 2, 3]


def write(opened: TrainingSession, count: int, seed: int = 5, **sampling: float) -> list[int]:
    """Return the tokens after the prompt."""
    prompt = torch.tensor(PROMPT)
    drawn = generate(opened.model, prompt, seed, opened.config.machine, SamplingOptions(**sampling))
    return list(islice(drawn, count))


def distinct(opened: TrainingSession) -> TrainingSession:
    """Set weights with which the next token depends on the whole context."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in opened.model.parameters():
            parameter.normal_(0, 1.0, generator=generator)
    return opened


def last_logits(opened: TrainingSession, ids: list[int]) -> Tensor:
    """Return the logits of a full forward pass on the last 16 tokens, the context."""
    opened.model.eval()
    with torch.no_grad():
        return opened.model(torch.tensor([ids[-16:]]))[0, -1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 1}])
def test_each_token_follows_from_the_model_and_the_context(session, sampling):
    """Drawn from the softmax of the last logits, or the likeliest; the context has 16 tokens."""
    opened = distinct(session())
    generator, ids = torch.Generator().manual_seed(5), list(PROMPT)
    for token in write(opened, 24, **sampling):
        logits_V = last_logits(opened, ids)
        drawn = torch.multinomial(torch.softmax(logits_V, -1), 1, generator=generator)
        assert token == (logits_V.argmax() if sampling else drawn)
        ids.append(token)
    assert len(set(ids[len(PROMPT) :])) > 2 and len(ids) == len(PROMPT) + 24


def test_a_token_costs_one_pass_of_one_token(session, monkeypatch):
    """A long prompt is processed in chunks; a full context is processed again for each token."""
    opened = session()
    lengths: list[int] = []
    hidden = opened.model.hidden
    monkeypatch.setattr(module, "_PREFILL_TOKENS", 10)
    monkeypatch.setattr(
        opened.model,
        "hidden",
        lambda ids, cache: lengths.append(ids.size(1)) or hidden(ids, cache),
    )
    drawn = generate(opened.model, torch.arange(13), 5, opened.config.machine)
    list(islice(drawn, 6))
    assert lengths == [10, 3, 1, 1, 1, 10, 6, 10, 6]


def test_the_seed_determines_the_text_without_side_effects(session):
    opened = session()
    before = rng_state(opened.device)["torch"]
    first = write(opened, 8)
    assert write(opened, 8) == first
    assert write(opened, 8, seed=6) != first
    assert torch.equal(rng_state(opened.device)["torch"], before)
    assert opened.model.training and torch.is_grad_enabled()
