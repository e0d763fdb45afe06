"""The sidecar process that samples the machine while one run trains.

    python -m lib.telemetry RUN_DIRECTORY SECONDS

The process appends samples to telemetry.jsonl until its standard input becomes readable or is
closed. The run's manifest lists the processes and GPUs to sample.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.companions import told_to_end
from lib.files import canonical_json
from lib.rundir import RunDir
from lib.telemetry.meter import Meter, NoGpus
from lib.telemetry.processes import memory_and_time

# Training has priority.
_NICENESS = 10


def sample(run: RunDir, seconds: float, ended: Callable[[float], bool]) -> None:
    """Append a sample every ``seconds``, starting at once, until ``ended(seconds)`` returns true.

    Raises OSError if the GPU driver cannot be queried.
    """
    record = json.loads(run.manifest.read_text())
    pids = record["volatile"]["pids"]
    meter = _meter(record["hardware"], record["processes"]["world_size"])
    with open(run.telemetry, "a", encoding="utf-8", buffering=1) as stream:
        while True:
            stream.write(canonical_json(_reading(meter, pids)) + "\n")
            if ended(seconds):
                return


def _reading(meter: Meter, pids: list[int]) -> dict[str, Any]:
    memory, cpu_seconds = memory_and_time(pids)
    gpus = [asdict(reading) for reading in meter.read()]
    return {
        "ts": time.time(),
        "rss_mib": memory,
        "cpu_seconds": cpu_seconds,
        "gpus": gpus,
    }


def _meter(hardware: dict[str, Any], gpus: int) -> Meter:
    """Return the meter of the GPU vendor; the vendor's library is imported only if needed."""
    if hardware["gpu_name"] is None:
        return NoGpus()
    if hardware["hip_version"] is not None:
        from lib.telemetry.amd import AmdMeter

        return AmdMeter(gpus)
    from lib.telemetry.nvidia import NvidiaMeter

    return NvidiaMeter(gpus)


if __name__ == "__main__":
    os.nice(_NICENESS)
    sample(RunDir(Path(sys.argv[1])), float(sys.argv[2]), told_to_end)
