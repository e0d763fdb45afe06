"""Scores of the state-pruning variants in plain Python, shifts included."""

import math

from lib.pruning.seen import Seen
from lib.pruning.state.options import StateOptions


class StateReference:
    """Scalar reference of StatePruner."""

    def __init__(self, options: StateOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
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
