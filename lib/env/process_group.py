"""Process group of a run: the ranks that train one run together, and their collective operations.

CPU tensors are exchanged with gloo, gradients on GPUs with NCCL (RCCL on ROCm). With a world size
of 1, every collective returns its input. R in shapes is the number of ranks.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.env.ranks import ProcessRank
from lib.env.sharded import shard_parameters, whole_state

M = TypeVar("M", bound=nn.Module)

# Bucket size for DDP_SAFE; torch's default is 25.
DDP_SAFE_BUCKET_MIB = 2
# Longer than anything rank 0 does while the others wait (a checkpoint, the final files). If one
# process dies, the launcher terminates all of them, so that no failure waits for this timeout.
_TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True)
class ProcessGroup:
    """Process group as seen by one rank. Every rank makes the same calls in the same order."""

    process: ProcessRank = field(default_factory=ProcessRank)
    # Live modules from share_gradients and shard.
    _wrapped_modules: WeakSet[nn.Module] = field(default_factory=WeakSet, repr=False, compare=False)

    @classmethod
    def join(cls, process: ProcessRank) -> Self:
        """Initialize the process group; blocks until all ranks have joined."""
        if process.world_size > 1:
            dist.init_process_group(
                # Both backends: agreed values are CPU tensors, so that no GPU has to synchronize.
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
        """Leave the process group; after an error, the exit of the process must report it first.

        Modules of ``share_gradients`` and ``shard`` must be deleted before: the destructor of their
        last owner would wait for gloo's threads with the GIL, which these need (pytorch issue 56297).
        """
        if self.size > 1 and error is None:
            if self._wrapped_modules:
                # A reference cycle may keep a module alive.
                gc.collect()
            assert not self._wrapped_modules, "a module that exchanges gradients outlives its group"
            dist.destroy_process_group()

    @property
    def size(self) -> int:
        return self.process.world_size

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def is_main(self) -> bool:
        """Return whether this process is rank 0, which makes decisions, writes files and logs."""
        return self.process.is_main

    def agree(self, number: float) -> float:
        """Broadcast rank 0's ``number`` to every rank."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(value, src=0)
        return value.item()

    def gather(self, row: Tensor) -> Tensor:
        """Gather each rank's CPU tensor ``row``, of equal shape on all ranks: [R, …]."""
        if self.size == 1:
            return row[None].clone()
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def add(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over the ranks (all-reduce) and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank; all ranks get the same result."""
        return flag if self.size == 1 else bool(self.gather(torch.tensor(flag)).any())

    def gather_text(self, text: str) -> list[str]:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(data.numel())).tolist()
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: data.numel()] = data
        rows = self.gather(row)
        return [bytes(r[:n].tolist()).decode() for r, n in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        self.add(torch.zeros(()))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, then on the other ranks."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def share_gradients(self, module: nn.Module, safe: bool = False) -> nn.Module:
        """Return ``module`` wrapped to average gradients over the ranks; delete it before leaving the group."""
        if self.size == 1:
            return module
        # None is torch's default. Buckets contain copies of the gradients.
        size = DDP_SAFE_BUCKET_MIB if safe else None
        shared = DistributedDataParallel(module, init_sync=False, bucket_cap_mb=size)
        self._wrapped_modules.add(shared)
        return shared

    def shard(self, module: M, blocks: Iterable[nn.Module], device: torch.device) -> M:
        """Shard ``module`` in place; return its copy without weights. Delete it before leaving the group."""
        blank = shard_parameters(module, blocks, device)
        self._wrapped_modules.add(module)
        return blank

    def exchange(self, module: Any, now: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a module from ``share_gradients``.

        Its gradients accumulate locally until a context with ``now=True``. Gradients of a sharded
        module are exchanged in every context, because a rank has no memory for all of them.
        """
        if now or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        return module.no_sync()

    def whole_state(self, state: Any) -> Any:
        return whole_state(state, self.is_main)

    def backend(self, device: torch.device) -> str:
        """Return the backend for gradients on ``device``: none, gloo or nccl."""
        if self.size == 1:
            return "none"
        return "gloo" if device.type == "cpu" else "nccl"


def is_lost_peer_error(error: RuntimeError) -> bool:
    # gloo has no exception class for it.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
