"""Inputs of the pruners' reference formulas; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """Snapshot of one tensor, flat and as Python floats, when its weights are scored."""

    weights: Sequence[float]
    # Unclipped gradient and weights at each step so far.
    history: Sequence[tuple[Sequence[float], Sequence[float]]] = ()
    # The optimizer's moments (empty if it has none), and 1 − β1ᵗ after its t steps.
    m: Sequence[float] = ()
    v: Sequence[float] = ()
    bias_correction: float = 1.0
