"""A sequence depends on nothing but itself: no other row, no earlier call, no mode before.

B batch, T tokens.
"""

import torch

from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject

_DROPOUT = "0.1"


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
    config = subject.exact
    if config.model.attention.backend != "joined":
        # Dropout that outlives training would draw another mask in every call.
        config = changed(config, DROPOUT=_DROPOUT)
    model, unused = subject.build(config), subject.build(config)
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
    model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        if not torch.equal(model(idx_BT), first):
            return [Finding("no trace of a training step without update", "evaluation differs")]
    return []
