"""Resident memory and CPU time of processes, read from /proc."""

import os
from collections.abc import Sequence
from pathlib import Path

_MIB = 1 << 20


def memory_and_time(pids: Sequence[int]) -> tuple[float, float]:
    """Return resident memory in MiB and CPU seconds, summed over ``pids``; ended ones count 0."""
    usage = [_memory_and_time(Path("/proc", str(pid))) for pid in pids]
    return sum(memory for memory, _ in usage), sum(seconds for _, seconds in usage)


def _memory_and_time(folder: Path) -> tuple[float, float]:
    try:
        pages = int((folder / "statm").read_text().split()[1])
        # Skip the process name, which is in parentheses and may contain any character.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB, ticks / os.sysconf("SC_CLK_TCK")
