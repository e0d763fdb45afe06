"""Per-layer statistics of a model as metrics for trackers and heartbeats."""

from collections.abc import Mapping, Sequence
from statistics import fmean

# Name → one value per layer; None if the layer has none.
Layers = Mapping[str, Sequence[float | None]]


def over_layers(values: Layers) -> dict[str, float]:
    """Return one value per name over all layers: the minimum of ``*_min``, the maximum of
    ``*_max``, else the mean.

    A name without a value in any layer is left out.
    """
    values_by_name = {name: known_values(layers) for name, layers in values.items()}
    return {name: _reduce(name, present) for name, present in values_by_name.items() if present}


def each_layer(values: Layers) -> dict[str, float]:
    """Return ``layer/<i>/<name>`` for every layer with a value, counted from 0."""
    return {
        f"layer/{i}/{name}": value
        for name, layers in values.items()
        for i, value in enumerate(layers)
        if value is not None
    }


def known_values(layers: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in layers if value is not None]


def _reduce(name: str, values: Sequence[float]) -> float:
    if name.endswith("_min"):
        return min(values)
    return max(values) if name.endswith("_max") else fmean(values)
