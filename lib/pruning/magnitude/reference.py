"""Magnitude pruning on plain lists: sort all, take the lowest."""

from lib.pruning.magnitude.options import MagnitudeOptions


def pruned(
    weights: list[list[float]], options: MagnitudeOptions, progress: float
) -> list[set[int]]:
    """Indices, for each list, of the weights that one update at ``progress`` prunes from fresh."""
    if progress <= options.warmup:
        wanted = 0.0
    elif progress >= options.ramp_end:
        wanted = options.target
    else:
        x = (progress - options.warmup) / (options.ramp_end - options.warmup)
        wanted = options.target * (x if options.ramp == "linear" else 1 - (1 - x) ** 3)
    if options.scope == "layer":
        return [_lowest([layer], wanted)[0] for layer in weights]
    return _lowest(weights, wanted)


def _lowest(layers: list[list[float]], share: float) -> list[set[int]]:
    ranked = sorted((abs(w), k, i) for k, layer in enumerate(layers) for i, w in enumerate(layer))
    found: list[set[int]] = [set() for _ in layers]
    for _, k, i in ranked[: round(share * len(ranked))]:
        found[k].add(i)
    return found
