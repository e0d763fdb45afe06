"""SLURM: the batch script of an array of workers, and the jobs of a study in the queue.

The scheduler only starts workers. Which runs are left, and who trains them, is in the run directories
(``lib.runs.lease``), so nothing is stored about jobs: their name is derived from the study's folder.
"""

import getpass
import hashlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lib.config.field import kconfig_field
from lib.errors import PreflightError, Problem
from lib.project import ROOT

# Folder of the workers' logs, in the study's folder.
_LOGS = "slurm"
_TIMEOUT_SECONDS = 60
_SCRIPT = """\
#!/bin/bash
{directives}
# Each member of the array is a worker: it takes runs that are neither done nor taken until none is left.
# Shortly before the time limit (USR1) it saves its run and is requeued; after a preemption (TERM) SLURM
# requeues it. The next worker that takes the run goes on with the same bytes.
cd {tree} || exit
{setup}{worker} &
worker=$!
trap 'requeue=y; kill -TERM "$worker"' USR1
trap 'kill -TERM "$worker"' TERM
wait "$worker"; code=$?
# A signal ends the first wait.
while kill -0 "$worker" 2> /dev/null; do wait "$worker"; code=$?; done
if [ "${{requeue-}}" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the workers' jobs; none of them changes a result."""

    workers: int = kconfig_field("SLURM_WORKERS", identity=False)
    partition: str = kconfig_field("SLURM_PARTITION", identity=False)
    account: str = kconfig_field("SLURM_ACCOUNT", identity=False)
    time: str = kconfig_field("SLURM_TIME", identity=False)
    signal_seconds: int = kconfig_field("SLURM_SIGNAL_SECONDS", identity=False)
    gres: str = kconfig_field("SLURM_GRES", identity=False)
    cpus: int = kconfig_field("SLURM_CPUS", identity=False)
    constraint: str = kconfig_field("SLURM_CONSTRAINT", identity=False)
    options: str = kconfig_field("SLURM_OPTIONS", identity=False)
    setup: str = kconfig_field("SLURM_SETUP", identity=False)


class QueuedJob(NamedTuple):
    """A job, or the waiting members of an array, as squeue lists it."""

    # 12_3, or 12_[4-9].
    id: str
    # Such as PENDING or RUNNING.
    state: str
    node: str
    # Since the start.
    time: str
    # Why it waits, such as Priority.
    reason: str

    def __str__(self) -> str:
        if self.node:
            return f"job {self.id} {self.state.lower()} on {self.node} for {self.time}"
        return f"job {self.id} {self.state.lower()}: {self.reason}"


def job_name(folder: Path) -> str:
    """Return the name of all jobs of the study in ``folder``, unique to the folder."""
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    return f"kablate-{re.sub(r'[^A-Za-z0-9]', '-', folder.name)}-{digest}"


def batch_script(folder: Path, options: SlurmOptions, gpus: int, worker: Sequence[str]) -> str:
    """Return the script of an array of workers, each started by the command ``worker``.

    ``gpus`` is the number of GPUs that a worker requires, 0 on a CPU.
    """
    values = {
        "job-name": job_name(folder),
        "array": f"1-{options.workers}",
        "output": str(folder.absolute() / _LOGS / "%A_%a.log"),
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "cpus-per-task": str(options.cpus),
        "gres": options.gres or (f"gpu:{gpus}" if gpus else ""),
        "constraint": options.constraint,
        "signal": f"B:USR1@{options.signal_seconds}",
    }
    words = [f"--{name}={shlex.quote(value)}" for name, value in values.items() if value]
    words += ["--requeue", "--open-mode=append", *map(shlex.quote, options.options.split())]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {word}" for word in words),
        tree=shlex.quote(str(ROOT)),
        setup=f"{options.setup}\n" if options.setup else "",
        worker=shlex.join(worker),
    )


def submit(script: str, folder: Path) -> str:
    """Submit a script and return the id of the array.

    Raises PreflightError if there is no sbatch or it refuses the script.
    """
    (folder / _LOGS).mkdir(parents=True, exist_ok=True)
    return _run(["sbatch", "--parsable"], script).partition(";")[0].strip()


def queued_jobs(folder: Path) -> list[QueuedJob]:
    """Return the jobs of the study in ``folder``; none if none was submitted from here.

    Raises PreflightError if squeue fails.
    """
    if not (folder / _LOGS).is_dir():
        return []
    select = ["--noheader", f"--user={getpass.getuser()}", f"--name={job_name(folder)}"]
    text = _run(["squeue", *select, "--format=%i|%T|%N|%M|%r"])
    return [QueuedJob(*line.split("|")[:5]) for line in text.splitlines() if line.count("|") >= 4]


def cancel_waiting(folder: Path) -> int:
    """Cancel the jobs of the study in ``folder`` that wait; return how many entries of squeue."""
    waiting = [job for job in queued_jobs(folder) if job.state == "PENDING"]
    if waiting:
        select = [f"--user={getpass.getuser()}", f"--name={job_name(folder)}"]
        _run(["scancel", "--state=PENDING", *select])
    return len(waiting)


def _run(words: Sequence[str], text: str = "") -> str:
    if shutil.which(words[0]) is None:
        what, advice = f"no such program: {words[0]}", "log in to a machine of a SLURM cluster"
        raise PreflightError(Problem(what, "SLURM", advice, code="slurm.missing"))
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"{words[0]} did not answer within {_TIMEOUT_SECONDS} s"
        raise PreflightError(Problem(what, "SLURM", code="slurm.failed")) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        what = f"{words[0]}: {lines[-1]}"
        raise PreflightError(Problem(what, "SLURM", "type: sinfo", code="slurm.failed"))
    return done.stdout
