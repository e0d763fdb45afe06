"""Stateless sampler: training windows addressed by their sequence number.

The position of sequence g depends only on the run's seed and on g, so it is the same for any number
of ranks, micro-batches, workers or steps, and there is no state to checkpoint.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt2.data.dataset import TokenSplit
from lib.errors import DataError, Problem
from lib.runs.seeds import stream_seed


class TrainSampler:
    """Sampler of uniformly random windows of ``block_size + 1`` tokens, with replacement."""

    def __init__(self, split: TokenSplit, block_size: int, seed: int) -> None:
        self._split = split
        self._length = block_size + 1
        self._positions = split.n_tokens - block_size
        self._seed = seed
        require_window(split.name, split.n_tokens, block_size)

    def offsets(self, first: int, count: int) -> list[int]:
        """Return the offset of the first token of sequences ``first`` to ``first + count``."""
        return sequence_offsets(self._seed, self._positions, first, count)

    def windows(self, offsets: Sequence[int]) -> np.ndarray:
        """Return the windows at ``offsets`` as ids [offsets, block_size + 1] (int64)."""
        windows = np.empty((len(offsets), self._length), dtype=np.int64)
        for row, offset in zip(windows, offsets, strict=True):
            row[:] = self._split.window(offset, self._length)
        return windows

    def sequences(self, first: int, count: int) -> np.ndarray:
        """Return sequences ``first`` to ``first + count``, ids [count, block_size + 1] (int64)."""
        return self.windows(self.offsets(first, count))


def require_window(name: str, n_tokens: int, block_size: int) -> None:
    """Raise DataError if the split ``name`` has no window of ``block_size + 1`` tokens."""
    if n_tokens <= block_size:
        what = (
            f"{name} split is shorter than one window "
            f"(expected at least {block_size + 1} tokens, got {n_tokens})"
        )
        advice = "type: make menuconfig, and choose a shorter context or a larger data set"
        raise DataError(Problem(what, "BLOCK_SIZE", advice, code="data.too-small"))


def sequence_offsets(seed: int, positions: int, first: int, count: int) -> list[int]:
    """Return the start, in [0, positions), of sequences ``first`` to ``first + count``.

    The generator is Philox 4×64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    2011), keyed by the seed's stream ``data``, with the number of the sequence as counter. Its raw 64
    bits b are scaled to ⌊b · positions / 2^64⌋: numpy guarantees the raw stream, while its bounded
    integers may change between versions. The bias is below positions / 2^64.
    """
    # Each counter value yields a block of four 64-bit words; the first is used.
    generator = np.random.Philox(key=stream_seed(seed, "data"), counter=first)
    bits = generator.random_raw(4 * count)[::4]
    return [(int(b) * positions) >> 64 for b in bits]


# Digest of the data order before the first step.
EMPTY_ORDER_DIGEST = hashlib.sha256().hexdigest()


def extend_order_digest(digest: str, step_offsets: np.ndarray) -> str:
    """Return the digest of the data order after one more step.

    SHA-256 of the previous ``digest`` and of the offsets [global batch] (int64, little-endian) that
    the step consumed, in sequence order. Chained, so a checkpoint stores only 64 hex digits.
    """
    content = bytes.fromhex(digest) + step_offsets.astype("<i8").tobytes()
    return hashlib.sha256(content).hexdigest()


def order_digest_from_manifest(manifest: Mapping[str, Any], iterations: int) -> str:
    """Return the data order's digest after ``iterations`` steps of the run with this ``manifest.json``.

    The data of the run is not read.
    """
    count, tokens = (manifest["batch"][n] for n in ("global_sequences", "tokens_per_iteration"))
    positions = manifest["data"]["splits"]["train"]["tokens"] - tokens // count
    digest, seed = EMPTY_ORDER_DIGEST, manifest["seeds"]["seed"]
    for step in range(iterations):
        offsets = sequence_offsets(seed, positions, step * count, count)
        digest = extend_order_digest(digest, np.array(offsets, dtype=np.int64))
    return digest
