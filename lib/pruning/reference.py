"""Reference formulas of the pruners in numpy's float64, as documented; imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lib.pruning.options import MagnitudeOptions, MovementOptions, PruningOptions, StateOptions

Scores = NDArray[np.float64]

# The table of docs/optimizers.md: ramp, scope and budget of each variant.
VARIANTS = {
    "bitter0": ("linear", "global", 1.0),
    "bitter1": ("linear", "global", 1.0),
    "bitter2": ("linear", "global", 1.21),
    "bitter3": ("cubic", "global", 1.3),
    "bitter4": ("cubic", "layer", 1.3),
    "bitter5": ("cubic", "global", 1.0),
    "bitter6": ("cubic", "global", 1.0),
    "bitter7": ("cubic", "global", 1.0),
    "bitter8": ("cubic", "global", 1.0),
    "bitter9": ("cubic", "global", 1.0),
}
_EPS = 1e-8
_MAX_LAYER_SPARSITY = 0.98


@dataclass(frozen=True)
class PruningSnapshot:
    """Snapshot of one tensor, of any shape, when its weights are scored."""

    weights: ArrayLike
    # Unclipped gradient and weights at each step so far.
    history: Sequence[tuple[ArrayLike, ArrayLike]] = ()
    # The optimizer's moments (empty if it has none), and 1 − β1ᵗ after its t steps.
    m: ArrayLike = ()
    v: ArrayLike = ()
    bias_correction: float = 1.0


def documented_stretch(variant: str) -> float:
    return VARIANTS[variant][2]


def ramp_sparsity(options: PruningOptions, progress: float) -> float:
    """Return the documented sparsity of the whole model at ``progress`` of the budget."""
    if progress <= options.warmup:
        return 0.0
    x = min(1.0, (progress - options.warmup) / (options.ramp_end - options.warmup))
    ramp = VARIANTS[options.variant][0] if isinstance(options, StateOptions) else options.ramp
    return options.target * (x if ramp == "linear" else 1.0 - (1.0 - x) ** 3)


def scope_sparsities(
    options: PruningOptions, reached: float, sizes: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Return the matrices with a common ranking, by index, and their documented sparsity."""
    is_state = isinstance(options, StateOptions)
    scope = VARIANTS[options.variant][1] if isinstance(options, StateOptions) else options.scope
    if scope == "global":
        return [(list(range(len(sizes))), reached)]
    shares = _layer_profile(reached, sizes) if is_state else [reached] * len(sizes)
    return [([i], share) for i, share in enumerate(shares)]


def _layer_profile(reached: float, sizes: Sequence[int]) -> list[float]:
    """Return min(cap, c (0.7 + 0.6 i / (L − 1))) of matrix i of L; c is found by bisection."""
    cap, total = max(_MAX_LAYER_SPARSITY, reached), reached * sum(sizes)
    profile = [0.7 + 0.6 * i / max(1, len(sizes) - 1) for i in range(len(sizes))]
    low, high = 0.0, cap / min(profile)
    for _ in range(60):
        c = (low + high) / 2
        pruned = sum(n * min(cap, c * p) for n, p in zip(sizes, profile, strict=True))
        low, high = (c, high) if pruned < total else (low, c)
    return [min(cap, high * p) for p in profile]


def lowest(layers: dict[int, list[float]], share: float) -> list[tuple[int, int]]:
    """Return the (tensor, element) of the lowest ``share`` of all scores; ties by position."""
    ranked = sorted((score, k, i) for k, layer in layers.items() for i, score in enumerate(layer))
    return [(k, i) for _, k, i in ranked[: round(share * len(ranked))]]


def _magnitude_scores(options: MagnitudeOptions, seen: PruningSnapshot) -> Scores:
    return np.abs(_array(seen.weights))


def _movement_scores(options: MovementOptions, seen: PruningSnapshot) -> Scores:
    """Return −Σ g w of each weight over all steps."""
    scores = np.zeros_like(_array(seen.weights))
    for gradients, weights in seen.history:
        scores -= _array(gradients) * _array(weights)
    return scores


def _state_scores(options: StateOptions, seen: PruningSnapshot) -> Scores:
    """Return the published scores without their shift, which changes no ranking."""
    w, m, v = _array(seen.weights), _array(seen.m), _array(seen.v)
    size, root = np.abs(w), np.sqrt(v) + _EPS
    mobile = size * np.sqrt(np.abs(m) + _EPS)
    towards_zero = np.sign(w) * m / root
    return {
        "bitter0": np.abs(w * m) * (size / root),
        "bitter1": size,
        "bitter2": size,
        "bitter3": mobile,
        "bitter4": mobile,
        "bitter5": 0.1 * size - towards_zero,
        "bitter6": mobile * np.abs(m) / np.sqrt(v + _EPS),
        "bitter7": size * (v + _EPS) ** 0.25,
        "bitter8": size * np.sqrt(np.abs(m / seen.bias_correction) + _EPS),
        "bitter9": mobile - 0.1 * towards_zero,
    }[options.variant]


def _array(values: ArrayLike) -> Scores:
    return np.asarray(values, dtype=np.float64)


# Scores of each pruner: one for each weight; the lowest are pruned.
REFERENCES: dict[type[Any], Callable[[Any, PruningSnapshot], Scores]] = {
    MagnitudeOptions: _magnitude_scores,
    MovementOptions: _movement_scores,
    StateOptions: _state_scores,
}
