"""Signs of life of one process of a run: a line at its start, each log interval and its end."""

import os
import time
from typing import Any

import torch

from lib.files import canonical_json
from lib.rundir import RunDir
from lib.telemetry.processes import memory_and_time

_MIB = 1 << 20


class Heartbeat:
    """Appends to heartbeat_rank<rank>.jsonl; a full disk is the trainer's to notice, not ours."""

    def __init__(self, run: RunDir, rank: int, device: torch.device) -> None:
        self._path = run.heartbeat(rank)
        self._rank = rank
        self._device = device
        self._fetch_seconds: list[float] = []

    def fetched(self, seconds: float) -> None:
        """A batch had to be waited for so long."""
        self._fetch_seconds.append(seconds)

    def beat(self, message: str, iteration: int, **facts: Any) -> None:
        """Append one line. OSError where that cannot be done."""
        allocated, reserved = self._memory()
        waits, self._fetch_seconds = self._fetch_seconds, []
        now = time.time()
        record = {
            "ts": now,
            "iso": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
            "pid": os.getpid(),
            "rank": self._rank,
            "step": iteration,
            "msg": message,
            "dt_fetch_s": sum(waits) / len(waits) if waits else None,
            "mem_alloc_mib": allocated,
            "mem_reserved_mib": reserved,
            **facts,
        }
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(canonical_json(record) + "\n")

    def _memory(self) -> tuple[float, float]:
        """MiB of tensors, and held from the driver; on a CPU the process's resident memory."""
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            return allocated / _MIB, torch.cuda.memory_reserved(self._device) / _MIB
        resident, _ = memory_and_time([os.getpid()])
        return resident, resident
