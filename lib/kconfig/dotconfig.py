"""Reader of ``.config`` files, with the origins of the values."""

import dataclasses
from pathlib import Path

from lib.errors import ConfigError, Problem
from lib.kconfig.layers import Layer, Origin, Resolution, as_text
from lib.kconfig.origins import Record, read_origins
from lib.kconfig.parse import read_file
from lib.kconfig.tree import Tree


def read_config(path: Path) -> Layer:
    """Return the full configuration as one layer. Raises ConfigError if ``path`` does not exist."""
    if not path.exists():
        advice = "make list-defconfigs, then make defconfig-NAME; or make menuconfig"
        raise ConfigError(Problem("no configuration", str(path), advice, code="config.missing"))
    return read_file(path, "config")


def resolve_config(tree: Tree, path: Path, *layers: Layer) -> Resolution:
    """Resolve ``path`` with ``layers`` on top; each value has its original source as origin.

    A line of the file that was changed since ``.config`` was written has the label "edited".
    """
    return with_origins(tree, tree.resolve([read_config(path), *layers]), path)


def with_origins(tree: Tree, resolution: Resolution, path: Path) -> Resolution:
    """Return ``resolution`` with the origins recorded beside ``path``.

    ``tree`` must have resolved ``resolution`` last.
    """
    records = read_origins(path)
    if records is None:
        return resolution
    origins = {
        name: _first_origin(tree, origin, as_text(resolution.values[name]), records.get(name), name)
        for name, origin in resolution.origins.items()
    }
    return dataclasses.replace(resolution, origins=origins)


def _first_origin(
    tree: Tree, origin: Origin | None, value: str, record: Record | None, name: str
) -> Origin | None:
    if origin is None or origin.label != "config":
        return origin
    if record is None or record["value"] != value:
        return dataclasses.replace(origin, label="edited")
    if record["label"] == "default":
        item = tree.find(name)
        assert item is not None, name
        if tree.default(item) == value:
            return None
        return dataclasses.replace(origin, label="former default", where=record["where"])
    return dataclasses.replace(origin, label=record["label"], where=record["where"])
