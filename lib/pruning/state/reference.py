"""Scores of the variants of state pruning on plain numbers, shifts included."""

import math

from lib.pruning.seen import Seen
from lib.pruning.state.options import StateOptions


class StateReference:
    """What StatePruner computes, one number at a time."""

    def __init__(self, options: StateOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
        """One score for each weight; the lowest go."""
        variant = self.options.variant
        numbers = zip(seen.weights, seen.m, seen.v, strict=True)
        found = [_score(variant, *each, seen.bias_correction) for each in numbers]
        shift = min(found) if variant in ("bitter5", "bitter9") else 0.0
        return [score - min(0.0, shift) for score in found]


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
