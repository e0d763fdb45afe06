"""Training batches as tensors, read here or by worker processes; the same ones either way.

B micro-batch, T tokens.
"""

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from gpt2.data.options import DataConfig
from gpt2.data.sampler import TrainSampler

# First sequence and number of sequences.
Span = tuple[int, int]
# Inputs x [B, T] and targets y [B, T], int64.
Batch = tuple[torch.Tensor, torch.Tensor]
# A batch, and the offsets [B] of its sequences in the split, int64.
Placed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(
    sampler: TrainSampler,
    config: DataConfig,
    plan: Iterable[Span],
    device_is_cuda: bool = False,
) -> Iterable[Placed]:
    """The batch of each span of ``plan``, in order; y is x moved by one token.

    With ``loader_workers`` they are read ahead by that many processes, which end with the iterator,
    or, if they persist, with what is returned. Takes nothing from torch's random streams.
    """
    windows = _Windows(sampler)
    pin = config.pin_memory and device_is_cuda
    if config.loader_workers == 0:
        return _InProcess(windows, plan, pin)
    return DataLoader(
        windows,
        sampler=plan,
        batch_size=None,
        num_workers=config.loader_workers,
        pin_memory=pin,
        persistent_workers=config.persistent_workers,
        prefetch_factor=config.prefetch_factor,
        worker_init_fn=_outlive_interrupt,
        # Without one, its seed would be drawn from torch's global generator.
        generator=torch.Generator().manual_seed(0),
    )


class BatchLoader:
    """The micro-batches of one rank, step by step, from ``start_step`` on without an end.

    Step s takes sequences s · global_batch and on; rank r takes the r-th equal part of them, in
    micro-batches of ``micro_batch``, so the ranks together see what one process would. Iterating
    again starts over at ``start_step``.

    ``offered`` is told the offsets [global_batch / world_size] of each step that is handed out.
    """

    def __init__(
        self,
        sampler: TrainSampler,
        data_config: DataConfig,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        device_is_cuda: bool,
        offered: Callable[[torch.Tensor], None] = lambda offsets: None,
    ) -> None:
        parts = micro_batch * world_size
        assert global_batch % parts == 0, (global_batch, micro_batch, world_size)
        self._micro_batches = global_batch // parts
        plan = _Plan(
            first=start_step * global_batch + rank * global_batch // world_size,
            stride=global_batch,
            micro_batch=micro_batch,
            micro_batches=self._micro_batches,
        )
        self._batches = batches(sampler, data_config, plan, device_is_cuda)
        self._offered = offered

    def __iter__(self) -> Iterator[list[Batch]]:
        """A list of this rank's (x [B, T], y [B, T]) for each optimizer step."""
        stream = iter(self._batches)
        while True:
            placed = [next(stream) for _ in range(self._micro_batches)]
            self._offered(torch.cat([offsets_B for _, _, offsets_B in placed]))
            yield [(x_BT, y_BT) for x_BT, y_BT, _ in placed]


class _Windows(Dataset):
    """Span → batch and its place; what a worker process holds."""

    def __init__(self, sampler: TrainSampler) -> None:
        self._sampler = sampler

    def __getitem__(self, span: Span) -> Placed:
        offsets = self._sampler.offsets(*span)
        tokens = torch.from_numpy(self._sampler.windows(offsets))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(offsets)


@dataclass(frozen=True)
class _InProcess:
    """The batches of a plan, read when they are asked for."""

    windows: _Windows
    plan: Iterable[Span]
    pin: bool

    def __iter__(self) -> Iterator[Placed]:
        for span in self.plan:
            x_BT, y_BT, offsets_B = self.windows[span]
            if self.pin:
                x_BT, y_BT = x_BT.pin_memory(), y_BT.pin_memory()
            yield x_BT, y_BT, offsets_B


@dataclass(frozen=True)
class _Plan:
    """The spans of one rank, in order, without an end; ``stride`` sequences from step to step."""

    first: int
    stride: int
    micro_batch: int
    micro_batches: int

    def __iter__(self) -> Iterator[Span]:
        for start in itertools.count(self.first, self.stride):
            for i in range(self.micro_batches):
                yield start + i * self.micro_batch, self.micro_batch


def _outlive_interrupt(worker: int) -> None:
    """Ctrl-C reaches the whole process group, but the step that is under way needs its batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
