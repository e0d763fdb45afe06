"""Heartbeat of one process of a run: a line at the start, at each log interval and at the end."""

import os
import time
from typing import Any

import torch

from lib.files import canonical_json
from lib.rundir import RunDir
from lib.telemetry.processes import memory_and_time

_MIB = 1 << 20


class Heartbeat:
    """Writer of heartbeat_rank<rank>.jsonl; the lines are not synced to the disk."""

    def __init__(self, run: RunDir, rank: int, device: torch.device) -> None:
        self._path = run.heartbeat(rank)
        self._rank = rank
        self._device = device
        self._fetch_seconds: list[float] = []

    def fetched(self, seconds: float) -> None:
        """Record the seconds spent waiting for a batch."""
        self._fetch_seconds.append(seconds)

    def beat(self, message: str, iteration: int, **facts: Any) -> None:
        """Append one line. Raises OSError if the line cannot be written."""
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
        """Return allocated and reserved GPU memory in MiB; on a CPU, resident memory for both."""
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            return allocated / _MIB, torch.cuda.memory_reserved(self._device) / _MIB
        resident, _ = memory_and_time([os.getpid()])
        return resident, resident
