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
    """Return the process described by torchrun's variables. Raises PreflightError unless they are numbers."""
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    numbers = {name: variables.get(name, default) for name, default in numbers.items()}
    for name, text in numbers.items():
        if not WHOLE_NUMBER.fullmatch(text):
            what = f"invalid environment variable {name}={text!r} (expected a number)"
            raise PreflightError(Problem(what, code="env.invalid-variable"))
    file = variables.get(_RENDEZVOUS)
    rank, world_size, local_rank = map(int, numbers.values())
    return ProcessRank(rank, world_size, local_rank, f"file://{file}" if file else "env://")


def rank_environment(rank: int, world_size: int, rendezvous: Path) -> dict[str, str]:
    """Return the variables of a process on this machine; the file ``rendezvous`` must not exist yet."""
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
