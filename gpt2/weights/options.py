"""Options of the initial weights; does not import torch."""

import re
from dataclasses import dataclass

from lib.config.field import kconfig_field
from lib.errors import ConfigError, Problem

_PATH = ("/", "./", "../", "~/")
# Names by the prefix: a model on the Hugging Face hub, with or without owner; a run directory.
_NAMES = {
    "hf": re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE),
    "run": re.compile(r"[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE),
}
# Iteration of a kept checkpoint, behind the name of a run.
_ITERATION = re.compile(r"@([0-9]{1,9})$", re.ASCII)


@dataclass(frozen=True)
class InitialWeightsOptions:
    """Initial weights: "" for random ones, ``hf:…`` a folder or model of the hub, ``run:…`` a finished run."""

    init_from: str = kconfig_field("INIT_FROM")
    # Other values for the same seed.
    init_stream: int = kconfig_field("INIT_STREAM", off=0)

    def __post_init__(self) -> None:
        if not self.init_from:
            return
        if self.init_stream:
            what = (
                f"INIT_STREAM: no effect on {self.init_from} (expected 0, got {self.init_stream})"
            )
            raise ConfigError(Problem(what, next="type: SET=INIT_STREAM=0", code="config.conflict"))
        names = _NAMES.get(self.init_from.partition(":")[0])
        if names is None or not (self.is_path or names.fullmatch(self.name)):
            what = f"INIT_FROM: invalid value {self.init_from!r}"
            advice = "set run:NAME of a run directory, hf:NAME of the hub, or hf:PATH "
            advice += "(PATH begins with / ./ ../ or ~/)"
            raise ConfigError(Problem(what, next=advice, code="config.invalid-value"))

    @property
    def name(self) -> str:
        """Return the path or name behind the prefix, without the iteration of a run."""
        name = self.init_from.partition(":")[2]
        return _ITERATION.sub("", name) if self.is_run else name

    @property
    def iteration(self) -> int | None:
        """Return the iteration of the run's checkpoint; None for the final weights."""
        match = _ITERATION.search(self.init_from) if self.is_run else None
        return int(match[1]) if match else None

    @property
    def is_run(self) -> bool:
        return self.init_from.startswith("run:")

    @property
    def is_path(self) -> bool:
        return self.name.startswith(_PATH)

    @property
    def is_hub(self) -> bool:
        return not self.is_run and not self.is_path
