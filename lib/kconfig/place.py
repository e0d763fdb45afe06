"""Where a configuration lives: the tree it is for, and the folder it builds in."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.binding import Value
from lib.kconfig.layers import Layer, Resolution
from lib.kconfig.tree import Tree


@dataclass(frozen=True)
class Place:
    """A source tree and a build folder; ``KCONFIG_CONFIG`` overrides the name of ``.config``."""

    root: Path
    build: Path
    # What Kconfig cannot say of values (floats, rules across symbols): raises ConfigError.
    rules: Callable[[Mapping[str, Value]], object] = dict

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.build / (os.environ.get("KCONFIG_CONFIG") or ".config")

    def resolve(self, tree: Tree, layers: Sequence[Layer]) -> Resolution:
        """The resolution, if it keeps the rules. ConfigError points at the lines that break one."""
        return tree.checked(layers, self.rules)[0]
