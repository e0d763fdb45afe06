"""Statistics of a model's layers as the metrics that trackers and heartbeats show."""

from collections.abc import Mapping, Sequence
from statistics import fmean

# Name → a value for each layer; None where the layer has none.
Layers = Mapping[str, Sequence[float | None]]


def over_layers(values: Layers) -> dict[str, float]:
    """One value for each name: the layers' mean; of ``*_min`` the least, of ``*_max`` the largest.

    A name that no layer has a value of is left out.
    """
    known = {name: known_values(layers) for name, layers in values.items()}
    return {name: _taken_together(name, found) for name, found in known.items() if found}


def each_layer(values: Layers) -> dict[str, float]:
    """``layer/<i>/<name>`` for every layer that has a value, from 0."""
    return {
        f"layer/{i}/{name}": value
        for name, layers in values.items()
        for i, value in enumerate(layers)
        if value is not None
    }


def known_values(layers: Sequence[float | None]) -> list[float]:
    """Of the layers that have one."""
    return [value for value in layers if value is not None]


def _taken_together(name: str, found: Sequence[float]) -> float:
    if name.endswith("_min"):
        return min(found)
    return max(found) if name.endswith("_max") else fmean(found)
