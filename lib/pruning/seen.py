"""What the formulas of a pruner read; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """One tensor, flat and as plain numbers, at the moment when its weights are scored."""

    weights: Sequence[float]
    # Gradient, not clipped, and weights at each step so far.
    history: Sequence[tuple[Sequence[float], Sequence[float]]] = ()
    # The optimizer's moments, and 1 − β1ᵗ after its t steps; nothing where it keeps none.
    m: Sequence[float] = ()
    v: Sequence[float] = ()
    bias_correction: float = 1.0
