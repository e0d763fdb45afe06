"""Magnitude pruning in plain Python: sort all weights, prune the lowest."""

from lib.pruning.magnitude.options import MagnitudeOptions
from lib.pruning.seen import Seen


class MagnitudeReference:
    """Scalar reference of MagnitudePruner."""

    def __init__(self, options: MagnitudeOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
        """Return |w| of each weight."""
        return [abs(w) for w in seen.weights]

    def pruned(self, tensors: list[Seen], progress: float) -> list[set[int]]:
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
