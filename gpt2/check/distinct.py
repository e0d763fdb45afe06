"""No two steps have the same configuration, or compute and learn the same function.

B batch, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.check.cases import CheckFinding
from gpt2.check.shrink import CONTEXT
from lib.files import canonical_json

if TYPE_CHECKING:
    from gpt2.check.subject import StepUnderTest

# float64 noise is far smaller, a change of the function or the optimizer far larger.
_TOLERANCE = 1e-9
_TRAINED_TOLERANCE = 1e-7
# The whole small context: a window may mask only its first tokens.
_LENGTH = CONTEXT

# Inner product of a tensor with a random tensor seeded by its name, and the tensor's norm.
Projections = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that identify the function a filled step computes and learns, without dropout.

    Keys of the mappings are a parameter's name and shape.
    """

    full_identity: str
    # Function of the small form.
    small_function: str
    outputs: Projections
    gradients: Projections
    trained: Projections


def check_distinct(subject: "StepUnderTest") -> list[CheckFinding]:
    """Compare the step with every other step that resolves."""
    fingerprints = {subject.case.slug: subject.fingerprint}
    for slug, case in subject.others.items():
        if case.config and slug != subject.case.slug:
            fingerprints[slug] = subject.beside(case).fingerprint
    return find_duplicates(subject.case.slug, fingerprints)


def find_duplicates(slug: str, fingerprints: Mapping[str, Fingerprint]) -> list[CheckFinding]:
    """Return a finding for each step that is equal to ``slug``."""
    this, findings = fingerprints[slug], []
    for other, peer in fingerprints.items():
        if other == slug:
            continue
        if this.full_identity == peer.full_identity:
            expected = f"another configuration than {other}"
            findings.append(
                CheckFinding("distinct-configuration", expected, "the same configuration")
            )
        elif this.small_function != peer.small_function and equal_fingerprints(this, peer):
            text = "outputs, gradients and trained weights are equal for equal parameters"
            expected = f"another function or another training than {other}"
            findings.append(CheckFinding("distinct-function", expected, text))
    return findings


def equal_fingerprints(a: Fingerprint, b: Fingerprint) -> bool:
    """Return whether two fingerprints are equal.

    Parameters that only one of the two steps has are ignored.
    """
    return (
        _close(a.outputs, b.outputs, _TOLERANCE)
        and _close(a.gradients, b.gradients, _TOLERANCE)
        and _close(a.trained, b.trained, _TRAINED_TOLERANCE)
    )


def fingerprint(subject: "StepUnderTest") -> Fingerprint:
    """Compute logits and gradients of the filled model, and the result of training it."""
    import torch

    from gpt2.check.short_run import ShortRun
    from gpt2.check.subject import fill_parameters, projections

    workshop, small = subject.workshop, subject.exact
    rehearsal = ShortRun(small, workshop.prepared(small), workshop.new_folder())
    session = rehearsal.session
    model = session.model.double().eval()
    fill_parameters(model)
    idx_BT = subject.tokens(2, _LENGTH)
    logits = model(idx_BT[:, :-1])
    # Compute the loss as the trainer does.
    session.forward(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradient_projections = projections(_by_shape(gradients))
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
        gradient_projections,
        projections(trained),
    )


def _by_shape(tensors: Mapping) -> dict:
    return {f"{name} {tuple(tensor.shape)}": tensor for name, tensor in tensors.items()}


def _close(a: Projections, b: Projections, tolerance: float) -> bool:
    """Return whether all common entries are equal, relative to their norms."""
    return all(
        abs(a[name][0] - b[name][0]) <= tolerance * max(a[name][1], b[name][1])
        for name in a.keys() & b.keys()
    )
