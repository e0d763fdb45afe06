"""Reference formulas of the pruners in plain Python; imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lib.pruning.options import MagnitudeOptions, MovementOptions, StateOptions


@dataclass(frozen=True)
class PruningSnapshot:
    """Snapshot of one tensor, flat and as Python floats, when its weights are scored."""

    weights: Sequence[float]
    # Unclipped gradient and weights at each step so far.
    history: Sequence[tuple[Sequence[float], Sequence[float]]] = ()
    # The optimizer's moments (empty if it has none), and 1 − β1ᵗ after its t steps.
    m: Sequence[float] = ()
    v: Sequence[float] = ()
    bias_correction: float = 1.0


class PrunerReference(Protocol):
    """Scalar reference of a pruner's scores."""

    def scores(self, seen: PruningSnapshot) -> list[float]:
        """Return one score for each weight; the lowest are pruned."""


class MagnitudeReference:
    """Scalar reference of MagnitudePruner."""

    def __init__(self, options: MagnitudeOptions) -> None:
        self.options = options

    def scores(self, seen: PruningSnapshot) -> list[float]:
        """Return |w| of each weight."""
        return [abs(w) for w in seen.weights]

    def pruned(self, tensors: list[PruningSnapshot], progress: float) -> list[set[int]]:
        """Return, per tensor, the indices that a first update at ``progress`` prunes."""
        options = self.options
        if progress <= options.warmup:
            sparsity = 0.0
        elif progress >= options.ramp_end:
            sparsity = options.target
        else:
            x = (progress - options.warmup) / (options.ramp_end - options.warmup)
            sparsity = options.target * (x if options.ramp == "linear" else 1 - (1 - x) ** 3)
        layers = [self.scores(seen) for seen in tensors]
        if options.scope == "layer":
            return [_lowest([layer], sparsity)[0] for layer in layers]
        return _lowest(layers, sparsity)


def _lowest(layers: list[list[float]], share: float) -> list[set[int]]:
    ranked = sorted(
        (score, k, i) for k, layer in enumerate(layers) for i, score in enumerate(layer)
    )
    indices: list[set[int]] = [set() for _ in layers]
    for _, k, i in ranked[: round(share * len(ranked))]:
        indices[k].add(i)
    return indices


class MovementReference:
    """Scalar reference of MovementPruner."""

    def __init__(self, options: MovementOptions) -> None:
        self.options = options

    def scores(self, seen: PruningSnapshot) -> list[float]:
        """Return −Σ g w of each weight over all steps."""
        return [
            -sum(gradients[i] * weights[i] for gradients, weights in seen.history)
            for i in range(len(seen.weights))
        ]


class StateReference:
    """Scalar reference of StatePruner, shifts of the published scores included."""

    def __init__(self, options: StateOptions) -> None:
        self.options = options

    def scores(self, seen: PruningSnapshot) -> list[float]:
        """Return one score for each weight; the lowest are pruned."""
        variant = self.options.variant
        elements = zip(seen.weights, seen.m, seen.v, strict=True)
        scores = [_score(variant, *element, seen.bias_correction) for element in elements]
        shift = min(scores) if variant in ("bitter5", "bitter9") else 0.0
        return [score - min(0.0, shift) for score in scores]


def _score(variant: str, w: float, m: float, v: float, bias_correction: float) -> float:
    e = 1e-8
    sign = math.copysign(1.0, w) if w else 0.0
    towards_zero = sign * m / (math.sqrt(v) + e)
    match variant:
        case "bitter0":
            return abs(w * m) * (abs(w) / (math.sqrt(v) + e))
        case "bitter1" | "bitter2":
            return abs(w)
        case "bitter3" | "bitter4":
            return abs(w) * math.sqrt(abs(m) + e)
        case "bitter5":
            return -towards_zero + 0.1 * abs(w)
        case "bitter6":
            return abs(w) * math.sqrt(abs(m) + e) * abs(m) / math.sqrt(v + e)
        case "bitter7":
            return abs(w) * (v + e) ** 0.25
        case "bitter8":
            return abs(w) * math.sqrt(abs(m / bias_correction) + e)
        case "bitter9":
            return abs(w) * math.sqrt(abs(m) + e) - 0.1 * towards_zero
    raise ValueError(f"unknown variant {variant!r}")
