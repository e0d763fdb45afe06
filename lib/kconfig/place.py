"""Where a configuration lives: the tree it is for, and the folder it builds in."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A source tree and a build folder; ``KCONFIG_CONFIG`` overrides the name of ``.config``."""

    root: Path
    build: Path

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.build / (os.environ.get("KCONFIG_CONFIG") or ".config")
