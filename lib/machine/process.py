"""Which process of a run this is: the one reader of a launcher's environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lib.errors import PreflightError


@dataclass(frozen=True)
class Process:
    """Place of this process among those that train one run together."""

    rank: int = 0
    world_size: int = 1
    # Rank within this machine; picks the GPU.
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


def current_process(variables: Mapping[str, str] = os.environ) -> Process:
    """The place that ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` give, as torchrun sets them.

    PreflightError when one of them is not a number.
    """
    return Process(
        rank=_number(variables, "RANK", 0),
        world_size=_number(variables, "WORLD_SIZE", 1),
        local_rank=_number(variables, "LOCAL_RANK", 0),
    )


def missing_variables(
    wanted: Mapping[str, str], variables: Mapping[str, str] = os.environ
) -> list[str]:
    """``NAME=value`` for each of ``wanted`` that this process was not started with."""
    return [f"{name}={value}" for name, value in wanted.items() if variables.get(name) != value]


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal():
        raise PreflightError(f"{name}={text!r} in the environment is not a number")
    return int(text)
