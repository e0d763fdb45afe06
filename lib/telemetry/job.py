"""Sidecar process that samples the machine during a run."""

from lib.companions import Job
from lib.rundir import RunDir


def sampler_job(run: RunDir, seconds: int) -> Job:
    """Return the sidecar process that samples every ``seconds``."""
    return Job(
        name="telemetry",
        arguments=["lib.telemetry", str(run.path), str(seconds)],
        log=run.logs,
        consequence="training continues without samples of GPUs and memory",
    )
