"""Source tree and build folder of a configuration."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.binding import Value
from lib.kconfig.layers import Layer, Resolution
from lib.kconfig.tree import Tree


@dataclass(frozen=True)
class Place:
    """Source tree and build folder; ``KCONFIG_CONFIG`` overrides the name of ``.config``."""

    root: Path
    build: Path
    # Checks that Kconfig cannot express (floats, rules across symbols); raises ConfigError.
    rules: Callable[[Mapping[str, Value]], object] = dict

    @property
    def config(self) -> Path:
        """Return the path of the configuration file."""
        return self.build / (os.environ.get("KCONFIG_CONFIG") or ".config")

    def resolve(self, tree: Tree, layers: Sequence[Layer]) -> Resolution:
        """Resolve ``layers`` and check the rules. Raises ConfigError with the offending lines."""
        return tree.checked(layers, self.rules)[0]
