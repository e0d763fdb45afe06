"""The fast form equals the formulas, and a mechanism of strength 0 equals none.

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
# Beyond every small window, and more than one piece of attention's walk.
_LENGTH = 14


def check(subject: Subject) -> list[Finding]:
    """In float64, where no parameter is zero."""
    return _formulas(subject) + _off(subject) + initial(subject)


def _formulas(subject: Subject) -> list[Finding]:
    """Logits, loss, and the gradient of every parameter."""
    model = subject.model
    ids_BT = subject.tokens(2, _LENGTH + 1)
    idx_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:].clone()
    targets_BT[0, 3] = IGNORED
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    requests = [block.mlp.request for block in model.h]
    expected = reference.gpt(idx_BT, parameters, subject.exact.model, requests)
    loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    with subject.in_pieces():
        with torch.no_grad():
            logits = model(idx_BT)
        # Without dropout training is the same function.
        mine = model.train()(idx_BT, targets_BT)
        mine.backward()
        model.eval()
    pairs = {"logits": (logits, expected), "the loss": (mine, loss)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameters[name].grad is not None:
            pairs[f"the gradient of {name}"] = (parameter.grad, parameters[name].grad)
    model.zero_grad(set_to_none=True)
    return [
        Finding(f"{what} as the formulas give it", f"differs by {error:.1e} of its size")
        for what, (found, wanted) in pairs.items()
        if not (error := _error(found, wanted)) <= _TOLERANCE
    ]


def _off(subject: Subject) -> list[Finding]:
    """Every mechanism that has a strength, at strength 0 and left out."""
    names = [name for registry in (TERMS, GATES, MECHANISMS) for name in registry]
    values = subject.exact.values
    # What has no strength cannot be told to have none.
    on = [n.upper() for n in names if values[n.upper()] and f"{n.upper()}_ALPHA" in values]
    if not on:
        return []
    # A mechanism is paid for by the width: it has to stay what it is.
    hidden = subject.exact.model.shape.n_embd * 2
    sized: dict[str, Value] = {"MLP_SIZING": "hidden", "MLP_HIDDEN": hidden}
    sized |= {"MLP_ATTN_GATE_DIM": 8, "MLP_CROSS_TOKEN_DIM": 8}
    # A learned strength would start at 0 and be filled.
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
    what = f"{', '.join(on)} of strength 0 changes nothing"
    return [Finding(what, f"logits differ by {error:.1e} of their size")]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value, if that is not zero."""
    difference, size = (found - wanted).detach().abs().max(), wanted.detach().abs().max()
    return float(difference / size) if size else float(difference)
