"""Text samples."""

from collections.abc import Callable

import torch

from gpt2.generate import generate
from gpt2.training.finish import text_sample
from gpt2.training.session import Session
from lib.repro.rng import rng_state

Open = Callable[..., Session]


def write(opened: Session, count: int, seed: int = 5) -> torch.Tensor:
    """The prompt 1, 2, 3 and what follows."""
    prompt = torch.tensor([1, 2, 3])
    return generate(opened.model, prompt, count, seed, 16, opened.config.machine)


def test_tokens_follow_the_models_own_distribution(session: Open) -> None:
    """Drawn one at a time from softmax of the last logits, the context cut to the last 16."""
    opened = session()
    with torch.no_grad():
        opened.model.wte.weight.mul_(20)
    found = write(opened, 24)
    assert found[:3].tolist() == [1, 2, 3] and len(found) == 27
    generator = torch.Generator().manual_seed(5)
    opened.model.eval()
    for end in range(3, 27):
        with torch.no_grad():
            logits = opened.model(found[max(0, end - 16) : end][None])[0, -1]
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        assert found[end] == drawn
    assert found.max() < 257


def test_the_seed_decides_and_nothing_else_is_touched(session: Open) -> None:
    opened = session()
    before = rng_state(opened.device)["torch"]
    first = write(opened, 8)
    torch.testing.assert_close(write(opened, 8), first)
    assert not torch.equal(write(opened, 8, seed=6), first)
    assert torch.equal(rng_state(opened.device)["torch"], before)
    assert opened.model.training


def test_the_sample_starts_with_the_prompt(session: Open) -> None:
    assert text_sample(session(SAMPLE_PROMPT="apples and")).startswith("apples and")
    assert len(text_sample(session(SAMPLE_PROMPT="", SAMPLE_TOKENS=5))) <= 6
