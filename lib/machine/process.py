"""Which process of a run this is: the one reader of a launcher's environment variables."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.errors import PreflightError

# A file through which the processes of a run find each other: no port that could be taken.
_RENDEZVOUS = "KABLATE_RENDEZVOUS"


@dataclass(frozen=True)
class Process:
    """Place of this process among those that train one run together."""

    rank: int = 0
    world_size: int = 1
    # Rank within this machine; picks the GPU.
    local_rank: int = 0
    # Where the processes meet: torchrun says it in variables that torch reads by itself.
    rendezvous: str = "env://"

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


def current_process(variables: Mapping[str, str] = os.environ) -> Process:
    """The place that ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` give, as torchrun sets them.

    PreflightError when one of them is not a number.
    """
    file = variables.get(_RENDEZVOUS)
    return Process(
        rank=_number(variables, "RANK", 0),
        world_size=_number(variables, "WORLD_SIZE", 1),
        local_rank=_number(variables, "LOCAL_RANK", 0),
        rendezvous=f"file://{file}" if file else "env://",
    )


def rank_variables(rank: int, world_size: int, rendezvous: Path) -> dict[str, str]:
    """Variables of one of ``world_size`` processes on this machine that meet at ``rendezvous``.

    The file must not exist yet. They talk over the loopback interface.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        _RENDEZVOUS: str(rendezvous),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


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
