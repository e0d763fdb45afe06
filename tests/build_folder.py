"""Configured build folders for tests, as make leaves them: ``.config`` and ``config.py``."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lib.config.dotconfig import ConfigWorkspace, write_constants
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.project import ROOT


@cache
def _tree() -> KconfigTree:
    """Return the Kconfig tree, parsed once."""
    return KconfigTree()


def write_build(folder: Path, settings: Mapping[str, SymbolValue], *below: ConfigLayer) -> Path:
    """Write a configuration of ``settings`` on top of the layers ``below``; return ``folder``."""
    layers = [*below, ConfigLayer.of("defconfig", "test", settings)]
    place = ConfigWorkspace(ROOT, folder)
    resolution = _tree().resolve(layers)
    _tree().write_config(resolution, place.config)
    write_constants(resolution, place)
    return folder


def write_texts(folder: Path) -> None:
    """Write a few texts into the folder ``text`` of a build folder, which may be absent."""
    (folder / "text").mkdir(parents=True)
    for i in range(12):
        (folder / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)
