"""Sidecar processes that mirror a run to its trackers."""

import shlex

from lib.companions import Job
from lib.modules import module_command
from lib.rundir import RunDir


def mirror_job(run: RunDir, name: str) -> Job:
    """Return the sidecar process for the tracker ``name``; missed records can be sent later."""
    arguments = ["lib.tracking.mirror", str(run.path), name]
    command = shlex.join(module_command(*arguments))
    consequence = (
        f"training continues, {run.metrics} is complete; to send the rest, type: "
        f"{command} < /dev/null"
    )
    return Job(name, arguments, run.tracker_log(name), consequence)
