"""Magnitude pruning on plain lists: sort all, take the lowest."""

from lib.pruning.magnitude.options import MagnitudeOptions
from lib.pruning.seen import Seen


class MagnitudeReference:
    """What MagnitudePruner does, one number at a time."""

    def __init__(self, options: MagnitudeOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
        """|w| of each weight."""
        return [abs(w) for w in seen.weights]

    def pruned(self, tensors: list[Seen], progress: float) -> list[set[int]]:
        """Indices, for each tensor, of the weights that one update at ``progress`` prunes from fresh."""
        options = self.options
        if progress <= options.warmup:
            wanted = 0.0
        elif progress >= options.ramp_end:
            wanted = options.target
        else:
            x = (progress - options.warmup) / (options.ramp_end - options.warmup)
            wanted = options.target * (x if options.ramp == "linear" else 1 - (1 - x) ** 3)
        layers = [self.scores(seen) for seen in tensors]
        if options.scope == "layer":
            return [_lowest([layer], wanted)[0] for layer in layers]
        return _lowest(layers, wanted)


def _lowest(layers: list[list[float]], share: float) -> list[set[int]]:
    ranked = sorted(
        (score, k, i) for k, layer in enumerate(layers) for i, score in enumerate(layer)
    )
    found: list[set[int]] = [set() for _ in layers]
    for _, k, i in ranked[: round(share * len(ranked))]:
        found[k].add(i)
    return found
