"""Training windows addressed by their number: no state to save, to restore or to share.

Sequence g of a run is a window at a position that depends on the run's seed and on g alone, so it
is the same however many ranks, micro-batches, workers or steps the run has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt2.data.store import Split
from lib.errors import DataError, Problem
from lib.repro.streams import stream_seed


class TrainSampler:
    """Uniformly random windows of ``block_size + 1`` tokens, with replacement.

    The randomness is Philox 4×64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    2011): a counter-based generator, keyed by the seed's stream ``data``, with g as the counter.
    """

    def __init__(self, split: Split, block_size: int, seed: int) -> None:
        self._split = split
        self._length = block_size + 1
        self._positions = split.n_tokens - block_size
        self._key = data_key(seed)
        if self._positions < 1:
            raise DataError(
                Problem(
                    f"{split.n_tokens} {split.name} tokens are fewer than one window of "
                    f"{self._length}",
                    "BLOCK_SIZE",
                    "type: make menuconfig, and choose a shorter context or a larger data set",
                )
            )

    def offsets(self, first: int, count: int) -> list[int]:
        """Position of the first token of sequences ``first`` to ``first + count``."""
        return offsets(self._key, self._positions, first, count)

    def windows(self, offsets: Sequence[int]) -> np.ndarray:
        """The windows that begin there, as ids [offsets, block_size + 1] (int64)."""
        windows = np.empty((len(offsets), self._length), dtype=np.int64)
        for row, offset in zip(windows, offsets, strict=True):
            row[:] = self._split.window(offset, self._length)
        return windows

    def sequences(self, first: int, count: int) -> np.ndarray:
        """Sequences ``first`` to ``first + count``, as ids [count, block_size + 1] (int64)."""
        return self.windows(self.offsets(first, count))


def data_key(seed: int) -> int:
    """The generator's key for the run's ``seed``."""
    return stream_seed(seed, "data")


def offsets(key: int, positions: int, first: int, count: int) -> list[int]:
    """Which of ``positions`` the sequences ``first`` to ``first + count`` begin at.

    The generator's raw 64 bits b are scaled to ⌊b · positions / 2^64⌋: numpy promises the raw
    stream, while its bounded integers may change from version to version. The bias is below
    positions / 2^64.
    """
    # A counter's block holds four numbers; the first is used.
    bits = np.random.Philox(key=key, counter=first).random_raw(4 * count)[::4]
    return [(int(b) * positions) >> 64 for b in bits]


# Before the first step.
NO_ORDER = hashlib.sha256().hexdigest()


def next_order(digest: str, step_offsets: np.ndarray) -> str:
    """The digest of the order of the data after one more step, from that before it.

    SHA-256 of the digest before and the offsets [global batch] (int64, little-endian) that the step
    consumed, in the order of their numbers: a chain, so that 64 digits carry it over a resume.
    """
    content = bytes.fromhex(digest) + step_offsets.astype("<i8").tobytes()
    return hashlib.sha256(content).hexdigest()


def order_digest(
    seed: int, n_tokens: int, block_size: int, global_batch: int, iterations: int
) -> str:
    """The digest of what a run of ``iterations`` steps consumes of ``n_tokens`` training tokens."""
    key, digest = data_key(seed), NO_ORDER
    for step in range(iterations):
        step_offsets = offsets(key, n_tokens - block_size, step * global_batch, global_batch)
        digest = next_order(digest, np.array(step_offsets, dtype=np.int64))
    return digest


def order_digest_of(manifest: Mapping[str, Any], iterations: int) -> str:
    """``order_digest`` of the run with that ``manifest.json``, without its data."""
    batch = manifest["batch"]
    return order_digest(
        manifest["seeds"]["seed"],
        manifest["data"]["splits"]["train"]["tokens"],
        batch["tokens_per_iteration"] // batch["global_sequences"],
        batch["global_sequences"],
        iterations,
    )
