"""Outputs of a sequence depend on nothing else: other rows, earlier calls, or earlier modes.

B batch, T tokens, C n_embd.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.model import GPT
from lib.errors import ConfigError

_DROPOUT = 0.5
# Allowed deviation of a dropped share, in standard deviations.
_MAX_DEVIATION = 4.5


def check(subject: Subject) -> list[Finding]:
    """Check isolation bit by bit, at one batch size."""
    with subject.in_pieces():
        return _rows(subject) + _calls(subject)


def _rows(subject: Subject) -> list[Finding]:
    """Check that the first and last rows do not depend on the middle row."""
    model, idx_BT = subject.model, subject.tokens(3)
    changed_BT = idx_BT.clone()
    changed_BT[1] = idx_BT[1].flip(0)
    with torch.no_grad():
        before, after = model(idx_BT), model(changed_BT)
    for row in (0, 2):
        if not torch.equal(before[row], after[row]):
            text = f"logits change by {float((before - after)[row].abs().max()):.1e}"
            expected = f"row {row} does not depend on row 1 of the batch"
            return [Finding("independent-rows", expected, text)]
    return []


def _calls(subject: Subject) -> list[Finding]:
    """Check that the same input gives the same output after other calls."""
    # Flash attention does not support dropout on a CPU; the math kernel computes the same form.
    kernel = (
        {"ATTENTION_BACKEND": "math"}
        if subject.exact.values["ATTENTION_BACKEND"] == "flash"
        else {}
    )
    try:
        # Dropout still active in eval mode would draw another mask in every call.
        config = changed(subject.exact, DROPOUT=str(_DROPOUT), **kernel)
    except ConfigError:
        # NSA and joined passes do not support dropout.
        config = subject.exact
    model = subject.build(config)
    unused = copy.deepcopy(model)
    idx_BT = subject.tokens(2)
    other_BT = idx_BT.flip(1)
    with torch.no_grad():
        first = model(idx_BT)
        if not torch.equal(model(idx_BT), first):
            expected = "the same output for the same input"
            return [Finding("repeatable-call", expected, "the second call differs")]
        if not torch.equal(model(other_BT), unused(other_BT)):
            expected = "no state from a first batch of the same shape"
            return [Finding("stateless-call", expected, "the next call differs")]
        model(subject.tokens(3, 7))
        if not torch.equal(model(idx_BT), first):
            expected = "no state from a batch of another shape"
            return [Finding("stateless-call", expected, "the next call differs")]
    model.train()
    if findings := _dropped(model, subject.tokens(32, 5), config.model.shape.dropout):
        return findings
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        if not torch.equal(model(idx_BT), first):
            expected = "no state from a training step without update"
            return [Finding("stateless-training", expected, "the evaluation differs")]
    return []


def _dropped(model: GPT, ids_BT: Tensor, rate: float) -> list[Finding]:
    """Check the dropout rates of embeddings, branches and attention weights in training."""
    zeros: dict[str, Tensor] = {}

    def record(location: str, x: Tensor) -> None:
        zeros[location] = x == 0.0

    has_keys_BT: list[Tensor] = []

    def record_first_token(location: str, x_BTC: Tensor) -> None:
        """Record the heads of the first token, which attends to one key or none."""
        has_keys_BT[:] = [x_BTC.any(-1)]
        record(location, x_BTC[:, 0].unflatten(-1, (model.config.shape.n_head, -1))[..., 0])

    def record_attention(location: str, x_BTC: Tensor) -> None:
        """Record tokens that attend to any key; others have no output to drop without a bias."""
        record(location, x_BTC[has_keys_BT[0]])

    def before(record: Any, location: str) -> Any:
        return lambda module, given: record(location, given[0])

    def after(record: Any, location: str) -> Any:
        return lambda module, given, out: record(location, out[0])

    hooks = [model.h[0].register_forward_pre_hook(before(record, "embeddings"))]
    for i, block in enumerate(model.h):
        hook = before(record_first_token, f"attention weights of block {i}")
        hooks.append(block.attn.c_proj.register_forward_pre_hook(hook))
        hooks.append(
            block.attn.register_forward_hook(after(record_attention, f"the attention of block {i}"))
        )
        hooks.append(block.mlp.register_forward_hook(after(record, f"the MLP of block {i}")))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    for hook in hooks:
        hook.remove()
    return [
        Finding(
            "dropout-rate",
            f"{rate:.0%} of {location} dropped in training",
            f"{float(zero.double().mean()):.0%}",
        )
        for location, zero in zeros.items()
        if abs(int(zero.sum()) / zero.numel() - rate)
        > _MAX_DEVIATION * 0.5 / math.sqrt(zero.numel())
    ]
