"""Training batches as tensors, read in this process or by worker processes with equal results.

Shape suffixes: B micro-batch, T tokens.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from gpt2.data.options import DataOptions
from gpt2.data.sampler import TrainSampler
from lib.files import is_alive
from lib.runner.signals import signals_blocked

# Number of the first sequence, and count of sequences.
SequenceRange = tuple[int, int]
# Inputs x [B, T] and targets y [B, T], int64.
Batch = tuple[torch.Tensor, torch.Tensor]


def _end_with(run: int, number: int) -> None:
    """End this worker process when process ``run`` has ended.

    torch's workers look at their parent between two batches, and a blocked read never ends. The
    parent may also be a fork server, which waits for them.
    """

    def watch() -> None:
        while is_alive(run):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end with the run", daemon=True).start()


class BatchLoader:
    """Endless iterable over the micro-batches of one rank, one list per step from ``start_step``.

    Step s consumes ``global_batch`` sequences from s · global_batch on; rank r gets the r-th equal
    part of them in micro-batches of ``micro_batch``, so all ranks together see the same sequences
    as a single process. ``offered`` is called with the offsets [global_batch / world_size] of each
    step before the step is yielded.

    With ``loader_workers``, that many processes read batches ahead; they exit with the iterator. Draws
    nothing from torch's generators.
    """

    def __init__(
        self,
        sampler: TrainSampler,
        config: DataOptions,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        device_is_cuda: bool,
        offered: Callable[[torch.Tensor], None] = lambda offsets: None,
    ) -> None:
        share = global_batch // world_size
        assert share * world_size == global_batch and share % micro_batch == 0, micro_batch
        self._micro_batches = share // micro_batch
        first = start_step * global_batch + rank * global_batch // world_size
        spans = (
            (start, micro_batch)
            for step in itertools.count(first, global_batch)
            for start in range(step, step + share, micro_batch)
        )
        workers = config.loader_workers
        # x [B, T], y [B, T] and offsets [B] of each micro-batch.
        self.micro_batches = DataLoader(
            _Windows(sampler),
            sampler=spans,
            batch_size=None,
            num_workers=workers,
            pin_memory=config.pin_memory and device_is_cuda,
            persistent_workers=workers > 0,
            prefetch_factor=config.prefetch_factor if workers else None,
            worker_init_fn=partial(_end_with, os.getpid()),
            # Without it, DataLoader draws a seed from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        self._offered = offered

    def __iter__(self) -> Iterator[list[Batch]]:
        # Signals reach all processes of a job, but the running step needs the workers' batches.
        with signals_blocked():
            stream = iter(self.micro_batches)
        while True:
            placed = [next(stream) for _ in range(self._micro_batches)]
            self._offered(torch.cat([offsets_B for _, _, offsets_B in placed]))
            yield [(x_BT, y_BT) for x_BT, y_BT, _ in placed]


class _Windows(Dataset):
    """Map-style dataset: span → batch and offsets. Worker processes receive a copy."""

    def __init__(self, sampler: TrainSampler) -> None:
        self._sampler = sampler

    def __getitem__(self, span: SequenceRange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offsets = self._sampler.offsets(*span)
        tokens = torch.from_numpy(self._sampler.windows(offsets))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(offsets)
