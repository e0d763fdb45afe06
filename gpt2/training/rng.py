"""Process-wide random generators: seeding, and saving and restoring their state.

Only dropout draws from torch's global generators; every other use has its own generator. The
generators of Python and NumPy are seeded too, so that libraries behave deterministically.
"""

import random
from typing import Any

import numpy as np
import torch

from lib.env.process_group import ProcessGroup
from lib.runs.checkpoint import state_digest
from lib.runs.seeds import stream_seed

# Recorded in the manifest, so that readers can reproduce the streams.
POLICY = "63 bits of SHA-256('SEED:STREAM'), one stream per purpose"
# Matsumoto & Nishimura 1998; Salmon et al. 2011.
ALGORITHMS = {
    "torch": "MT19937 on a CPU, Philox 4x32-10 on a GPU",
    "numpy": "MT19937, NumPy's legacy generator",
    "python": "MT19937",
    "data": "Philox 4x64-10, the sequence's number as its counter",
}
# Generators used by dropout; their states differ between ranks.
_OF_RANKS = {"torch", "cuda"}


def dropout_seed(seed: int, rank: int) -> int:
    """Return the dropout seed of a rank: ranks process different data and drop different units."""
    return stream_seed(seed, f"dropout/{rank}" if rank else "dropout")


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed torch (every device), NumPy and Python from the ``seed`` of the run."""
    torch.manual_seed(dropout_seed(seed, rank))
    # NumPy's legacy generator accepts 32-bit seeds.
    np.random.seed(stream_seed(seed, "numpy") % 2**32)
    random.seed(stream_seed(seed, "python"))


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, in types that torch.load(weights_only=True) accepts."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.copy()), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def rng_digests(device: torch.device) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of the state of every generator of this process."""
    return {name: state_digest(value) for name, value in rng_state(device).items()}


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    random.setstate(state["python"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def gather_rng_state(group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return the state of every generator; those that differ per rank are gathered [R, bytes]."""
    state = rng_state(device)
    return state | {name: group.gather(state[name]) for name in _OF_RANKS & state.keys()}


def restore_rng_state(state: dict[str, Any], group: ProcessGroup, device: torch.device) -> None:
    """Restore what was gathered; a rank missing in the saved run keeps its seeded stream."""
    if group.rank < len(state["torch"]):
        # Clone: torch misreads a row view of a larger tensor, and crashes.
        rows = {name: state[name][group.rank].clone() for name in _OF_RANKS & state.keys()}
        set_rng_state(state | rows, device)
