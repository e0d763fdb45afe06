"""The processes that train one run together, and what they tell each other.

Numbers on a CPU travel by gloo, gradients on GPUs by NCCL (RCCL on ROCm). Alone, a process has
nobody to ask: each exchange then gives back what it was given. R ranks.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.machine.process import Process

# torch's own are 25.
SAFE_BUCKET_MIB = 2
# Longer than anything that rank 0 does while the others wait: a checkpoint, the final files. Whoever
# started the processes ends them all when one of them dies, so no failure waits for this.
_TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True)
class Group:
    """One process's view of the processes of its run. Every rank makes the same calls in order."""

    process: Process = field(default_factory=Process)
    # What shares gradients and is still alive.
    _sharing: WeakSet[nn.Module] = field(default_factory=WeakSet, repr=False, compare=False)

    @classmethod
    def join(cls, process: Process) -> Self:
        """Meet the other processes; waits until all are there."""
        if process.world_size > 1:
            dist.init_process_group(
                # Both: what is agreed upon lies on the CPU, and asking a GPU would stall it.
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                init_method=process.rendezvous,
                rank=process.rank,
                world_size=process.world_size,
                timeout=_TIMEOUT,
            )
        return cls(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Part from the others. After an error, the end of the process does: it speaks first.

        What shares gradients has to be gone by then. Were it the last to hold torch's process
        group, it would wait, without letting go of the interpreter, for gloo's threads to end; and
        they wait for the interpreter to let go of their last tensor (pytorch issue 56297).
        """
        if self.size > 1 and error is None:
            if self._sharing:
                # A reference cycle may be all that holds it.
                gc.collect()
            assert not self._sharing, "what shares gradients outlives its group"
            dist.destroy_process_group()

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.process.world_size

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.process.rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, writes and speaks."""
        return self.process.is_main

    def agree(self, number: float) -> float:
        """Rank 0's ``number``, on every rank."""
        if self.size == 1:
            return number
        told = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(told, src=0)
        return told.item()

    def gather(self, row: Tensor) -> Tensor:
        """The ``row`` of each rank, which lies on the CPU and has one shape on all: [R, …]."""
        if self.size == 1:
            return row[None].clone()
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def add(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over the ranks, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; the same answer on all of them."""
        return flag if self.size == 1 else bool(self.gather(torch.tensor(flag)).any())

    def gather_text(self, text: str) -> list[str]:
        """The ``text`` of each rank."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(data.numel())).tolist()
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: data.numel()] = data
        rows = self.gather(row)
        return [bytes(r[:n].tolist()).decode() for r, n in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.add(torch.zeros(()))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 does what stands inside; then the others do."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def share_gradients(self, module: nn.Module, safe: bool = False) -> nn.Module:
        """``module``, with gradients that are the mean over the ranks after ``backward``.

        ``safe`` sends them in small buckets, of which each is a copy. Its weights are expected to be the same on every rank: nothing is sent to make them so.
        Let go of it before the group is left.
        """
        if self.size == 1:
            return module
        buckets = {"bucket_cap_mb": SAFE_BUCKET_MIB} if safe else {}
        shared = DistributedDataParallel(
            module, init_sync=False, gradient_as_bucket_view=False, **buckets
        )
        self._sharing.add(shared)
        return shared

    def exchange(self, module: Any, now: bool) -> AbstractContextManager[None]:
        """A context for forward and backward of what ``share_gradients`` gave.

        Gradients stay on their rank, and add up there, until one with ``now``.
        """
        return nullcontext() if now or self.size == 1 else module.no_sync()

    def backend(self, device: torch.device) -> str:
        """What gradients on ``device`` travel by: none, gloo or nccl."""
        if self.size == 1:
            return "none"
        return "gloo" if device.type == "cpu" else "nccl"


def lost_peer(error: RuntimeError) -> bool:
    """Whether ``error`` says that another process is gone; gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
