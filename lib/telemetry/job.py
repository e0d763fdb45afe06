"""The process that samples the machine of a run."""

from lib.companions import Job
from lib.rundir import RunDir


def sampler_job(run: RunDir, seconds: int) -> Job:
    """One that samples every ``seconds``."""
    return Job(
        name="telemetry",
        arguments=["lib.telemetry", str(run.path), str(seconds)],
        log=run.logs,
        consequence="the run goes on, without samples of GPUs and memory",
    )
