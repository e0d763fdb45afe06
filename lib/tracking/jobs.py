"""The processes that mirror a run to its trackers."""

import shlex

from lib.companions import Job
from lib.modules import module_command
from lib.rundir import RunDir


def mirror_job(run: RunDir, name: str) -> Job:
    """The one for the tracker ``name``; what it misses can be told later."""
    arguments = ["lib.tracking.mirror", str(run.path), name]
    again = shlex.join(module_command(*arguments))
    consequence = (
        f"the run goes on, {run.metrics} has it all; to tell the rest, type: {again} < /dev/null"
    )
    return Job(name, arguments, run.tracker_log(name), consequence)
