"""A sequence depends on nothing but itself: no other row, no earlier call, no mode before.

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
# Standard deviations of what chance drops.
_SPREAD = 4.5


def check(subject: Subject) -> list[Finding]:
    """Bits are compared, at one batch size."""
    with subject.in_pieces():
        return _rows(subject) + _calls(subject)


def _rows(subject: Subject) -> list[Finding]:
    """The first row beside others, and the last."""
    model, idx_BT = subject.model, subject.tokens(3)
    changed_BT = idx_BT.clone()
    changed_BT[1] = idx_BT[1].flip(0)
    with torch.no_grad():
        before, after = model(idx_BT), model(changed_BT)
    for row in (0, 2):
        if not torch.equal(before[row], after[row]):
            text = f"logits change by {float((before - after)[row].abs().max()):.1e}"
            return [Finding(f"row {row} does not depend on row 1 of the batch", text)]
    return []


def _calls(subject: Subject) -> list[Finding]:
    """The same input gives the same output, whatever came between."""
    # Flash attention drops no weights on a CPU; this kernel is of the same form.
    kernel = (
        {"ATTENTION_BACKEND": "math"}
        if subject.exact.values["ATTENTION_BACKEND"] == "flash"
        else {}
    )
    try:
        # Dropout that outlives training would draw another mask in every call.
        config = changed(subject.exact, DROPOUT=str(_DROPOUT), **kernel)
    except ConfigError:
        # NSA and joined passes have none.
        config = subject.exact
    model = subject.build(config)
    unused = copy.deepcopy(model)
    idx_BT = subject.tokens(2)
    other_BT = idx_BT.flip(1)
    with torch.no_grad():
        first = model(idx_BT)
        if not torch.equal(model(idx_BT), first):
            return [Finding("the same output for the same input", "the second call differs")]
        if not torch.equal(model(other_BT), unused(other_BT)):
            return [Finding("no trace of a first batch of this shape", "the next call differs")]
        model(subject.tokens(3, 7))
        if not torch.equal(model(idx_BT), first):
            return [Finding("no trace of another batch", "the call after it differs")]
    model.train()
    if found := _dropped(model, subject.tokens(32, 5), config.model.shape.dropout):
        return found
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        if not torch.equal(model(idx_BT), first):
            return [Finding("no trace of a training step without update", "evaluation differs")]
    return []


def _dropped(model: GPT, ids_BT: Tensor, wanted: float) -> list[Finding]:
    """Training drops its part of the embeddings, of every branch, and of the attention weights."""
    zeros: dict[str, Tensor] = {}

    def note(place: str, x: Tensor) -> None:
        zeros[place] = x == 0.0

    attended: list[Tensor] = []

    def note_first_token(place: str, x_BTC: Tensor) -> None:
        """Its heads have one key to see, or none."""
        attended[:] = [x_BTC.any(-1)]
        note(place, x_BTC[:, 0].unflatten(-1, (model.config.shape.n_head, -1))[..., 0])

    def note_attention(place: str, x_BTC: Tensor) -> None:
        """Of tokens that saw any key; without a bias the others get nothing to drop."""
        note(place, x_BTC[attended[0]])

    def before(note: Any, place: str) -> Any:
        return lambda module, given: note(place, given[0])

    def after(note: Any, place: str) -> Any:
        return lambda module, given, out: note(place, out[0])

    hooks = [model.h[0].register_forward_pre_hook(before(note, "embeddings"))]
    for i, block in enumerate(model.h):
        seen = before(note_first_token, f"attention weights of block {i}")
        hooks.append(block.attn.c_proj.register_forward_pre_hook(seen))
        hooks.append(
            block.attn.register_forward_hook(after(note_attention, f"the attention of block {i}"))
        )
        hooks.append(block.mlp.register_forward_hook(after(note, f"the MLP of block {i}")))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    for hook in hooks:
        hook.remove()
    return [
        Finding(
            f"{wanted:.0%} of {place} dropped in training", f"{float(zero.double().mean()):.0%}"
        )
        for place, zero in zeros.items()
        if abs(int(zero.sum()) / zero.numel() - wanted) > _SPREAD * 0.5 / math.sqrt(zero.numel())
    ]
