"""The identity of a run: its settings that can change a bit of the result, flat, and the digest of an arm."""

from collections.abc import Mapping
from typing import Any

from lib.files import json_digest


def configuration_digest(identity: Mapping[str, Any]) -> str:
    """Return the digest of an identity without its seed: that of every run of an arm."""
    without = {name: value for name, value in identity.items() if name != "seed"}
    return json_digest(without)[:16]


def flatten_identity(identity: Any, path: str = "") -> dict[str, Any]:
    """Return path → value of a nested identity.

    ``{"optimizer": {"name": "adamw", "eps": 1}}`` gives the paths "optimizer" and "optimizer.eps".
    Components in a list are keyed by their names, so their order does not matter.
    """
    # Of JSON: isinstance of an abstract class takes ten times as long.
    if isinstance(identity, dict):
        flat = {path: identity["name"]} if path and "name" in identity else {}
        for key, value in identity.items():
            if not (path and key == "name"):
                flat |= flatten_identity(value, f"{path}.{key}" if path else key)
        return flat
    if isinstance(identity, list) and any(isinstance(item, dict) for item in identity):
        flat = {}
        for item in identity:
            flat |= flatten_identity(item, f"{path}.{item['name']}")
        return flat
    if isinstance(identity, list):
        return {path: identity} if identity else {}
    return {path: identity}
