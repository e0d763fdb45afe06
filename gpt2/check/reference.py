"""The optimized model equals the reference formulas, and strength 0 equals absence.

B batch, T tokens.
"""

import torch

from gpt2 import reference
from gpt2.attention import GATES, TERMS
from gpt2.check.finding import Finding
from gpt2.check.initial import initial
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.loss import IGNORED
from gpt2.mlp import MECHANISMS
from lib.binding import Value

_TOLERANCE = 1e-9
# Longer than every small window, and more than one chunk of attention.
_LENGTH = 14


def check(subject: Subject) -> list[Finding]:
    """Check formulas, strength 0 and initialization, in float64 with no parameter at zero."""
    return _formulas(subject) + _zero_strength(subject) + initial(subject)


def _formulas(subject: Subject) -> list[Finding]:
    """Compare logits, loss and the gradient of every parameter with the reference."""
    model = subject.model
    ids_BT = subject.tokens(2, _LENGTH + 1)
    idx_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:].clone()
    targets_BT[0, 3] = IGNORED
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    requests = [block.mlp.request for block in model.h]
    logits_by_formula = reference.gpt(idx_BT, parameters, subject.exact.model, requests)
    loss = torch.nn.functional.cross_entropy(
        logits_by_formula.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    with subject.in_pieces():
        with torch.no_grad():
            logits = model(idx_BT)
        # Without dropout, training computes the same function.
        actual_loss = model.train()(idx_BT, targets_BT)
        actual_loss.backward()
        model.eval()
    pairs = {"logits": (logits, logits_by_formula), "the loss": (actual_loss, loss)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameters[name].grad is not None:
            pairs[f"the gradient of {name}"] = (parameter.grad, parameters[name].grad)
    model.zero_grad(set_to_none=True)
    return [
        Finding("reference-formulas", f"{what} by the formulas", f"a relative error of {error:.1e}")
        for what, (actual, expected) in pairs.items()
        if not (error := _error(actual, expected)) <= _TOLERANCE
    ]


def _zero_strength(subject: Subject) -> list[Finding]:
    """Compare mechanisms at strength 0 with a model without them."""
    names = [name for registry in (TERMS, GATES, MECHANISMS) for name in registry]
    values = subject.exact.values
    # Mechanisms without a strength cannot be set to strength 0.
    on = [n.upper() for n in names if values[n.upper()] and f"{n.upper()}_ALPHA" in values]
    if not on:
        return []
    # Parameters of a mechanism reduce the MLP width under ratio sizing, so the width is fixed here.
    hidden = subject.exact.model.shape.n_embd * 2
    sized: dict[str, Value] = {"MLP_SIZING": "hidden", "MLP_HIDDEN": hidden}
    sized |= {"MLP_ATTN_GATE_DIM": 8, "MLP_CROSS_TOKEN_DIM": 8}
    # A learned strength would start at 0 and then be filled.
    zero: dict[str, Value] = {f"{name}_ALPHA": "0.0" for name in on} | {
        "RECIPROCAL_LEARNABLE": False
    }
    without: dict[str, Value] = {name: False for name in on}
    idx_BT = subject.tokens(2, _LENGTH)
    with torch.no_grad():
        off = subject.build(changed(subject.exact, **sized, **zero))(idx_BT)
        none = subject.build(changed(subject.exact, **sized, **without))(idx_BT)
    if (error := _error(off, none)) <= _TOLERANCE:
        return []
    expected = f"{', '.join(on)} of strength 0 has no effect"
    return [Finding("zero-strength", expected, f"logits have a relative error of {error:.1e}")]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value unless that is 0."""
    difference, size = (actual - expected).detach().abs().max(), expected.detach().abs().max()
    return float(difference / size) if size else float(difference)
