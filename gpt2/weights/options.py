"""Options of the initial weights; does not import torch."""

import re
from dataclasses import dataclass

from lib.config.field import kconfig_field
from lib.errors import ConfigError, Problem

_PATH = ("/", "./", "../", "~/")
# A model name on the Hugging Face hub, with or without owner.
_HUB_NAME = re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class InitialWeightsOptions:
    """Options of the initial weights: "" for random initialization, ``hf:…`` for a GPT-2."""

    init_from: str = kconfig_field("INIT_FROM")
    # Other values for the same seed.
    init_stream: int = kconfig_field("INIT_STREAM")

    def __post_init__(self) -> None:
        if not self.init_from:
            return
        if self.init_stream:
            what = (
                f"INIT_STREAM: no effect on {self.init_from} (expected 0, got {self.init_stream})"
            )
            raise ConfigError(Problem(what, next="type: SET=INIT_STREAM=0", code="config.conflict"))
        prefixed = self.init_from.startswith("hf:")
        if not prefixed or not (self.is_path or _HUB_NAME.fullmatch(self.name)):
            raise ConfigError(
                Problem(
                    f"INIT_FROM: invalid value {self.init_from!r}",
                    next="set hf:PATH (PATH begins with / ./ ../ or ~/) or hf:NAME of the hub",
                    code="config.invalid-value",
                )
            )

    @property
    def name(self) -> str:
        """Return the path or hub name after ``hf:``."""
        return self.init_from.removeprefix("hf:")

    @property
    def is_path(self) -> bool:
        """Return whether the weights are a local folder; a bare name always refers to the hub."""
        return self.name.startswith(_PATH)
