"""Rank and world size from the launcher's environment, which only this module reads."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.config.field import WHOLE_NUMBER
from lib.errors import PreflightError, Problem

# Rendezvous file of the processes of a run; unlike a port, it cannot be in use already.
_RENDEZVOUS = "KABLATE_RENDEZVOUS"


@dataclass(frozen=True)
class ProcessRank:
    """Rank of this process among the processes that train one run together."""

    rank: int = 0
    world_size: int = 1
    # Rank within this machine; selects the GPU.
    local_rank: int = 0
    # Init method of torch.distributed; env:// reads the variables set by torchrun.
    rendezvous: str = "env://"

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def current_process(variables: Mapping[str, str] = os.environ) -> ProcessRank:
    """Return the process described by ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` (as set by
    torchrun).

    Raises PreflightError if one of them is not a number.
    """
    file = variables.get(_RENDEZVOUS)
    return ProcessRank(
        rank=_number(variables, "RANK", 0),
        world_size=_number(variables, "WORLD_SIZE", 1),
        local_rank=_number(variables, "LOCAL_RANK", 0),
        rendezvous=f"file://{file}" if file else "env://",
    )


def rank_environment(rank: int, world_size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment of one of ``world_size`` processes on this machine.

    ``rendezvous`` is a file that must not exist yet. Processes communicate over the loopback
    interface.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        _RENDEZVOUS: str(rendezvous),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


def missing_variables(
    expected: Mapping[str, str], variables: Mapping[str, str] = os.environ
) -> list[str]:
    """Return ``NAME=value`` for each entry of ``expected`` that is not set in ``variables``."""
    return [f"{name}={value}" for name, value in expected.items() if variables.get(name) != value]


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not WHOLE_NUMBER.fullmatch(text):
        what = f"invalid environment variable {name}={text!r} (expected a number)"
        raise PreflightError(Problem(what, code="env.invalid-variable"))
    return int(text)
