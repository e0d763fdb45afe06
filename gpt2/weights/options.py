"""Where the initial weights come from; imports no torch."""

import re
from dataclasses import dataclass

from lib.binding import symbol
from lib.errors import ConfigError, Problem

_PATH = ("/", "./", "../", "~/")
# A model of the hub, with its owner or without.
_HUB_NAME = re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class InitOptions:
    """ "" draws the initial weights from the seed; ``hf:…`` takes those of a GPT-2."""

    init_from: str = symbol("INIT_FROM")

    def __post_init__(self) -> None:
        if not self.init_from:
            return
        known = self.init_from.startswith("hf:")
        if not known or not (self.is_path or _HUB_NAME.fullmatch(self.name)):
            what = f"INIT_FROM: {self.init_from!r} names no weights"
            advice = (
                "hf: goes before a path that begins with / ./ ../ or ~/, or before a hub's name"
            )
            raise ConfigError(Problem(what, next=advice))

    @property
    def name(self) -> str:
        """What stands after ``hf:``: a path or a name of the hub."""
        return self.init_from.removeprefix("hf:")

    @property
    def is_path(self) -> bool:
        """Whether it is a folder of this machine; no folder is ever taken for a hub's name."""
        return self.name.startswith(_PATH)
