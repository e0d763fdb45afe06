"""No two steps are the same: not as configurations, and not in what they compute and learn.

B batch, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.check.finding import Finding
from gpt2.check.shrink import CONTEXT
from lib.files import canonical_json

if TYPE_CHECKING:
    from gpt2.check.subject import Subject

# float64 noise stays far below, a change of the function or the optimizer far above.
_TOLERANCE = 1e-9
_TRAINED_TOLERANCE = 1e-7
# The whole small context: a window may hide its first tokens alone.
_LENGTH = CONTEXT

# A tensor's product with a random one of its name, and its norm.
Projections = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Fingerprint:
    """What a filled step computes and learns without dropout, as numbers that can be compared.

    Keys of the mappings are a parameter's name and shape.
    """

    full_identity: str
    # Of the small form.
    small_function: str
    outputs: Projections
    gradients: Projections
    trained: Projections


def check(subject: "Subject") -> list[Finding]:
    """Compares with every other step that resolves."""
    fingerprints = {subject.case.slug: subject.fingerprint}
    for slug, case in subject.others.items():
        if case.config and slug != subject.case.slug:
            fingerprints[slug] = subject.beside(case).fingerprint
    return compare(subject.case.slug, fingerprints)


def compare(slug: str, fingerprints: Mapping[str, Fingerprint]) -> list[Finding]:
    """A finding for each step that ``slug`` is the same as."""
    mine, found = fingerprints[slug], []
    for other, its in fingerprints.items():
        if other == slug:
            continue
        if mine.full_identity == its.full_identity:
            found.append(Finding(f"another configuration than {other}", "the same configuration"))
        elif mine.small_function != its.small_function and same(mine, its):
            what = "outputs, gradients and trained weights are equal for equal parameters"
            found.append(Finding(f"another function or another training than {other}", what))
    return found


def same(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether two steps cannot be told apart; a parameter that only one has tells nothing."""
    return (
        _close(a.outputs, b.outputs, _TOLERANCE)
        and _close(a.gradients, b.gradients, _TOLERANCE)
        and _close(a.trained, b.trained, _TRAINED_TOLERANCE)
    )


def fingerprint(subject: "Subject") -> Fingerprint:
    """Logits and gradients of the filled model, and what the trainer makes of it."""
    import torch

    from gpt2.check.fill import fill, projections
    from gpt2.check.rehearsal import Rehearsal

    workshop, small = subject.workshop, subject.exact
    rehearsal = Rehearsal(small, workshop.prepared(small), workshop.new_folder())
    session = rehearsal.session
    model = session.model.double().eval()
    fill(model)
    idx_BT = subject.tokens(2, _LENGTH)
    logits = model(idx_BT[:, :-1])
    # The trainer's own path to the loss.
    session.forward(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = projections(_by_shape(gradients))
    session.optimizer.zero_grad(set_to_none=True)
    for i in range(session.budget.iterations):
        piece_BT = subject.tokens(1, _LENGTH, skip=i * _LENGTH)
        rehearsal.step([(piece_BT[:, :-1], piece_BT[:, 1:])])
    trained = _by_shape(session.weights())
    with torch.no_grad():
        trained["logits"] = model(idx_BT[:, :-1])
    rehearsal.close()
    return Fingerprint(
        canonical_json(subject.config.identity()),
        canonical_json(small.function()),
        projections({"logits": logits}),
        found,
        projections(trained),
    )


def _by_shape(tensors: Mapping) -> dict:
    return {f"{name} {tuple(tensor.shape)}": tensor for name, tensor in tensors.items()}


def _close(a: Projections, b: Projections, tolerance: float) -> bool:
    """Whether all that both have is equal, relative to its norm."""
    return all(
        abs(a[name][0] - b[name][0]) <= tolerance * max(a[name][1], b[name][1])
        for name in a.keys() & b.keys()
    )
