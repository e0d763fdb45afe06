"""Memory and processor time of processes, as the kernel counts them."""

import os
from collections.abc import Sequence
from pathlib import Path

_MIB = 1 << 20


def memory_and_time(pids: Sequence[int]) -> tuple[float, float]:
    """Resident memory in MiB and processor seconds, summed; a process that is gone counts nothing."""
    found = [_of(Path("/proc", str(pid))) for pid in pids]
    return sum(memory for memory, _ in found), sum(seconds for _, seconds in found)


def _of(folder: Path) -> tuple[float, float]:
    try:
        pages = int((folder / "statm").read_text().split()[1])
        # After the name, which is in parentheses and may hold anything.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB, ticks / os.sysconf("SC_CLK_TCK")
