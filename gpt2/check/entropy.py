"""Loss on random tokens: a step that falls below their entropy has read the targets.

B batch, T tokens, V size of the random vocabulary.
"""

import math

import torch
import torch.nn.functional as F

from gpt2.attention.nsa.module import Nsa
from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.model import GPT

# Few, so that the model soon learns the frequency of each.
_VOCABULARY = 8
_ROWS = 8
_STEPS = 30
_LEARNING_RATE = 1e-2
# Final steps whose losses are averaged: 8 · 40 tokens each, of exactly known entropy.
_EVAL_STEPS = 5
_SLACK_NATS = 0.02


def check(subject: Subject) -> list[Finding]:
    """Check that the loss on fresh uniform tokens stays at ln V.

    Only steps with native sparse attention are checked; others pass.
    """
    if not isinstance(subject.model.h[0].attn.pattern, Nsa):
        return []
    # One layer is enough for a leak, and the causal check covers all layers.
    model = GPT(changed(subject.exact, N_LAYER=1).model)
    model.init_weights(subject.exact.seed)
    length = subject.tokens(1).shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    losses_T = torch.zeros(length - 1)
    for step in range(_STEPS + _EVAL_STEPS):
        idx_BT = torch.randint(_VOCABULARY, (_ROWS, length), generator=generator)
        with torch.set_grad_enabled(step < _STEPS):
            logits_BTV = model(idx_BT[:, :-1])
        losses_BT = F.cross_entropy(logits_BTV.mT, idx_BT[:, 1:], reduction="none")
        if step >= _STEPS:
            losses_T += losses_BT.detach().mean(0) / _EVAL_STEPS
        else:
            optimizer.zero_grad()
            losses_BT.mean().backward()
            optimizer.step()
    entropy, quarters = math.log(_VOCABULARY), losses_T.chunk(4)
    lowest = min(quarters, key=lambda losses: float(losses.mean()))
    if float(lowest.mean()) >= entropy - _SLACK_NATS:
        return []
    expected = f"a loss of ln {_VOCABULARY} = {entropy:.2f} nats on random tokens"
    return [Finding("no-future-leak", expected, f"{float(lowest.mean()):.2f} after {_STEPS} steps")]
