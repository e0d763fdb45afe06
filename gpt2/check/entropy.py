"""Random tokens cannot be predicted: a step that learns to has seen them.

B batch, T tokens, V tokens that are drawn from.
"""

import math

import torch
import torch.nn.functional as F

from gpt2.attention.nsa.module import Nsa
from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.model import GPT

# Few, so that a model knows soon how often each comes.
_TOKENS = 8
_ROWS = 8
_STEPS = 30
_LEARNING_RATE = 1e-2
# Steps in the end over which the loss is averaged: 8 · 40 tokens each, whose entropy is exact.
_MEASURED = 5
_SLACK_NATS = 0.02


def check(subject: Subject) -> list[Finding]:
    """Of steps with native sparse attention: the loss on fresh uniform tokens stays at ln V."""
    if not isinstance(subject.model.h[0].attn.pattern, Nsa):
        return []
    # One layer: a leak needs no more, and the causal check has looked at all.
    model = GPT(changed(subject.exact, N_LAYER=1).model)
    model.init_weights(subject.exact.seed)
    length = subject.tokens(1).shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    losses_T = torch.zeros(length - 1)
    for step in range(_STEPS + _MEASURED):
        idx_BT = torch.randint(_TOKENS, (_ROWS, length), generator=generator)
        with torch.set_grad_enabled(step < _STEPS):
            logits_BTV = model(idx_BT[:, :-1])
        losses_BT = F.cross_entropy(logits_BTV.mT, idx_BT[:, 1:], reduction="none")
        if step >= _STEPS:
            losses_T += losses_BT.detach().mean(0) / _MEASURED
        else:
            optimizer.zero_grad()
            losses_BT.mean().backward()
            optimizer.step()
    floor, quarters = math.log(_TOKENS), losses_T.chunk(4)
    lowest = min(quarters, key=lambda losses: float(losses.mean()))
    if float(lowest.mean()) >= floor - _SLACK_NATS:
        return []
    what = f"a loss of ln {_TOKENS} = {floor:.2f} nats on random tokens"
    return [Finding(what, f"{float(lowest.mean()):.2f} after {_STEPS} steps")]
