"""Check that no two steps have the same configuration, or compute and learn the same function.

The steps are compared by fingerprints: numbers that their own processes computed. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.check.finding import CheckFinding

# Inner product of a tensor with a random tensor, and the tensor's norm, by name and shape.
Projections = Mapping[str, tuple[float, float]]
# Float64 noise is far smaller, a change of the function or the optimizer far larger.
_TOLERANCES = {"outputs": 1e-9, "gradients": 1e-9, "trained": 1e-7}


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that identify the function a filled step computes and learns, without dropout."""

    full_identity: str
    # Canonical settings of the small form that determine its function.
    small_function: str
    outputs: Projections
    gradients: Projections
    trained: Projections


def find_duplicates(slug: str, fingerprints: Mapping[str, Fingerprint]) -> list[CheckFinding]:
    """Return a finding for each step that equals ``slug`` in the parameters that both have."""
    this, findings = fingerprints[slug], []
    for other, peer in fingerprints.items():
        if other == slug:
            continue
        if this.full_identity == peer.full_identity:
            expected, text = f"another configuration than {other}", "the same configuration"
            findings.append(CheckFinding("distinct-configuration", expected, text))
        elif this.small_function != peer.small_function and all(
            _close(vars(this)[name], vars(peer)[name], tolerance)
            for name, tolerance in _TOLERANCES.items()
        ):
            text = "outputs, gradients and trained weights are equal for equal parameters"
            expected = f"another function or another training than {other}"
            findings.append(CheckFinding("distinct-function", expected, text))
    return findings


def _close(a: Projections, b: Projections, tolerance: float) -> bool:
    """Return whether all common entries are equal, relative to their norms."""
    return all(
        abs(a[name][0] - b[name][0]) <= tolerance * max(a[name][1], b[name][1])
        for name in a.keys() & b.keys()
    )
