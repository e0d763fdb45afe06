"""Loss on unpredictable tokens: a leak of later tokens would push it below the entropy."""

import math

import pytest
import torch

from gpt2.model import GPT
from tests.gpt2.builders import make_model_config

VOCAB = 16
LENGTH = 40
STEPS = 200


@pytest.mark.long
def test_loss_on_random_tokens_stays_at_its_entropy(nsa):
    """Train on new uniform tokens; the loss must be ln V at every position up to noise."""
    config = make_model_config(
        "grouped",
        "nsa",
        parts={"nsa": vars(nsa())},
        n_layer=1,
        n_embd=32,
        block_size=LENGTH,
        vocab_size=VOCAB,
    )
    model = GPT(config)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses_T = torch.zeros(LENGTH)
    for step in range(STEPS + 20):
        idx_BT = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=generator)
        logits_BTV = model(idx_BT[:, :-1])
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), idx_BT[:, 1:], reduction="none"
        )
        if step >= STEPS:
            losses_T += loss_BT.detach().mean(0) / 20
            continue
        optimizer.zero_grad()
        loss_BT.mean().backward()
        optimizer.step()
    buckets = losses_T.view(5, -1).mean(1)
    assert buckets.min() >= math.log(VOCAB) - 0.02
    # It has learned that there is nothing to learn.
    assert losses_T.mean() < math.log(VOCAB) + 0.1
