"""Training windows addressed by their number: no state to save, to restore or to share.

Sequence g of a run is a window at a position that depends on the run's seed and on g alone, so it
is the same however many ranks, micro-batches, workers or steps the run has.
"""

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
        self._key = stream_seed(seed, "data")
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
        """Position of the first token of sequences ``first`` to ``first + count``.

        The generator's raw 64 bits b are scaled to ⌊b · positions / 2^64⌋: numpy promises the raw
        stream, while its bounded integers may change from version to version. The bias is below
        positions / 2^64.
        """
        # A counter's block holds four numbers; the first is used.
        bits = np.random.Philox(key=self._key, counter=first).random_raw(4 * count)[::4]
        return [(int(b) * self._positions) >> 64 for b in bits]

    def sequences(self, first: int, count: int) -> np.ndarray:
        """Sequences ``first`` to ``first + count``, as ids [count, block_size + 1] (int64)."""
        windows = np.empty((count, self._length), dtype=np.int64)
        for row, offset in zip(windows, self.offsets(first, count), strict=True):
            row[:] = self._split.window(offset, self._length)
        return windows
