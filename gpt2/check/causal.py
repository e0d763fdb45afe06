"""No token attends to a later token.

B batch, T tokens, V vocabulary.
"""

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject

# Patterns whose summation order depends on the data, so that bits may differ.
_DATA_DEPENDENT = ("nsa",)
_TOLERANCE = 1e-12


def check(subject: Subject) -> list[Finding]:
    """Check causality in float64, by perturbing tokens and by gradients at several positions."""
    with subject.in_pieces():
        return _by_change(subject) + _by_gradient(subject)


def _by_change(subject: Subject) -> list[Finding]:
    model, idx_BT = subject.model, subject.tokens(1)
    length = idx_BT.size(1)
    exact = subject.config.model.attention.pattern.name not in _DATA_DEPENDENT
    with torch.no_grad():
        before = model(idx_BT)
        for t in _positions(length):
            changed_BT = idx_BT.clone()
            changed_BT[0, t] = (changed_BT[0, t] + 101) % 256
            after = model(changed_BT)
            difference = (after - before)[:, :t].abs().amax(-1)[0]
            leaks = difference > (0.0 if exact else _TOLERANCE)
            if bool(leaks.any()):
                first = int(leaks.nonzero()[0])
                text = f"logits at {first} change by {float(difference.max()):.1e}"
                expected = f"token {t} changes no logits before {t}"
                return [Finding("causal-logits", expected, text)]
            if torch.equal(after[:, t:], before[:, t:]):
                expected = f"token {t} changes logits from {t} on"
                return [Finding("token-affects-logits", expected, "no change")]
    return []


def _by_gradient(subject: Subject) -> list[Finding]:
    """Check that ∂ logits at t / ∂ embedding at s is 0 for s > t.

    Each row of the batch tests another t.
    """
    model = subject.model
    positions = _positions(subject.tokens(1).size(1))[:-1]
    idx_BT = subject.tokens(1).expand(len(positions), -1)
    embedded: list[Tensor] = []
    hook = model.wte.register_forward_hook(lambda module, inputs, out: embedded.append(out))
    logits = model(idx_BT)
    hook.remove()
    rows = range(len(positions))
    selected = torch.stack([logits[b, t] for b, t in zip(rows, positions, strict=True)])
    (gradient,) = torch.autograd.grad(selected.square().sum(), embedded[:1])
    for b, t in zip(rows, positions, strict=True):
        later = gradient[b, t + 1 :].abs().amax(-1)
        if bool(later.any()):
            source = t + 1 + int(later.nonzero()[0])
            expected = f"logits at {t} do not depend on token {source}"
            return [Finding("causal-gradient", expected, f"a gradient of {float(later.max()):.1e}")]
        if not bool(gradient[b, t].any()):
            expected = f"logits at {t} depend on token {t}"
            return [Finding("token-gradient", expected, "a gradient of zero")]
    return []


def _positions(length: int) -> list[int]:
    """Return the second position, two in the middle, and the last one."""
    return sorted({1, length // 3, length // 2 + 1, length - 1})
