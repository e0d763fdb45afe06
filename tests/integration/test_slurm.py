"""A study on a real SLURM cluster of two nodes, on the loopback interface."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lib.config.field import SymbolValue
from lib.project import ROOT
from lib.runs.lease import read_lease
from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import Folder
from tests.integration.test_kill import DETERMINISTIC, outcome
from tests.loopback.slurm import (
    ClusterNotStarted,
    SlurmCluster,
    free_ports,
    is_installed,
    slurm_cluster,
)

STEPS = "0-3"
_PATIENCE_SECONDS = 180

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="requires slurm-wlm: apt-get install slurm-wlm"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as running:
            yield running
    except ClusterNotStarted as error:
        pytest.skip(f"SLURM does not start on this machine: {error}")


@pytest.fixture
def study(build, cluster) -> Callable[..., "Study"]:
    def small(steps: str = STEPS, **settings: SymbolValue) -> "Study":
        return Study(build(SLURM_CPUS=1, **settings), cluster, steps)

    return small


class Study:
    """A study in a folder, and its jobs."""

    def __init__(self, folder: Folder, cluster: SlurmCluster, steps: str) -> None:
        self.folder, self.cluster, self.steps = folder, cluster, steps
        self.runs = [RunDir(path) for path in folder.runs(steps)]

    def command(self, script: str, *words: str) -> tuple[int, str, str]:
        """Run a script of the tree as a user of the cluster; workers are forks of the server."""
        variables = {"STEPS": self.steps, "SLURM_CONF": str(self.cluster.conf)}
        python = self.folder.server.interpreter()
        done = self.folder.start(script, *words, python=python, **variables)
        return done.wait(), done.stdout, done.stderr

    def submit(self) -> None:
        """Submit the study."""
        code, _, said = self.command("slurm", "--submit")
        assert code == 0, said

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Poll until ``condition`` is true."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the output of all workers."""
        logs = self.folder.path.glob("results/ratio/slurm/*.log")
        return "\n".join(log.read_text() for log in logs)

    def states(self) -> list[State | None]:
        """Return the state of each run, None before its start."""
        statuses = [read_status(run) for run in self.runs]
        return [status.state if status else None for status in statuses]

    def alone(self) -> dict[str, bytes]:
        """Return the files of the runs that make trains; they are moved away."""
        # One by one: the time of a command is limited.
        for step in self.steps.split(","):
            make = self.folder.start("all", STEPS=step)
            assert make.wait() == 0, make.stderr
        files = outcome(self.folder.path)
        (self.folder.path / "results").rename(self.folder.path / "alone")
        return files

    def submit_both(self) -> dict[str, bytes]:
        """Return the files of the two runs as make trains them, once both train on the cluster."""
        alone = self.alone()
        self.submit()
        self.wait_for(lambda: sum(run.metrics.exists() for run in self.runs) == 2)
        return alone

    def attempts(self) -> list[list[str]]:
        """Return the states in which the attempts of each run ended."""
        records = [json.loads(run.manifest.read_text())["volatile"] for run in self.runs]
        return [[attempt["state"] for attempt in record["attempts"]] for record in records]

    def jobs(self) -> list[str]:
        """Return the members of the array that have not ended."""
        return self.cluster.command(
            "squeue", "--noheader", "--array", "--format=%i %T"
        ).splitlines()


def test_workers_train_each_run_once_with_the_bytes_of_make(study):
    job = study("0-2", SLURM_WORKERS=2)
    alone = job.alone()
    code, script, _ = job.command("slurm")
    assert code == 0 and script.startswith("#!/bin/bash\n") and not job.jobs()
    job.submit()
    job.wait_for(lambda: not job.jobs())
    assert job.states() == [State.SUCCESS] * 3
    assert outcome(job.folder.path) == alone
    leases = [read_lease(run) for run in job.runs]
    assert all(lease and lease.token == 1 and lease.holder and lease.holder.job for lease in leases)


def test_a_worker_whose_time_is_nearly_over_is_requeued_and_its_run_goes_on(study):
    # The run must last until the signal arrives.
    job = study("0", SLURM_WORKERS=1, MAX_ITERS=400, LOG_INTERVAL=1)
    job.submit()
    job.wait_for(lambda: any(run.metrics.exists() for run in job.runs))
    (member,) = [line.split()[0] for line in job.jobs()]
    # As SLURM sends it before the time limit.
    job.cluster.command("scancel", "--batch", "--signal=USR1", member)
    job.wait_for(lambda: State.INTERRUPTED in job.states())
    job.wait_for(lambda: any(line == f"{member} RUNNING" for line in job.jobs()))
    job.wait_for(lambda: not job.jobs())
    assert job.states() == [State.SUCCESS], job.logs()
    assert job.attempts() == [["INTERRUPTED", "SUCCESS"]]


@pytest.mark.long
def test_a_preempted_worker_is_requeued_and_its_run_ends_with_the_same_bytes(study):
    job = study("0,3", SLURM_WORKERS=2, MAX_ITERS=400, LOG_INTERVAL=1)
    alone = job.submit_both()
    words = ("--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3")
    job.cluster.command("sbatch", *words)
    job.wait_for(lambda: job.states().count(State.INTERRUPTED) == 2)
    job.wait_for(lambda: not job.jobs())
    assert job.states() == [State.SUCCESS] * 2, job.logs()
    assert outcome(job.folder.path) == alone
    assert job.attempts() == [["INTERRUPTED", "SUCCESS"]] * 2


@pytest.mark.long
def test_a_killed_controller_costs_no_run(study):
    job = study("0,3", SLURM_WORKERS=3, MAX_ITERS=400, LOG_INTERVAL=1)
    alone = job.submit_both()
    # slurmctld saves its state within five seconds.
    time.sleep(6)
    job.cluster.kill("slurmctld")
    time.sleep(5)
    job.cluster.start_controller()
    job.wait_for(lambda: job.states() == [State.SUCCESS] * 2)
    assert outcome(job.folder.path) == alone


def test_status_shows_the_queue_and_stop_cancels_what_waits(study):
    job = study(SLURM_WORKERS=4, MAX_ITERS=1_000_000, LOG_INTERVAL=1)
    assert job.command("stop")[0] == 2
    job.submit()
    job.wait_for(lambda: job.states().count(State.RUNNING) == 2)
    code, text, said = job.command("status")
    assert code == 0, said
    assert text.count(" running on n") == 2 and " pending: " in text
    assert all(f"(job {line.split()[0]})" in text for line in job.jobs() if "RUNNING" in line)
    code, _, said = job.command("stop")
    assert code == 0, said
    job.wait_for(lambda: not job.jobs())
    assert job.states().count(State.INTERRUPTED) == 2 and job.states().count(None) == 2


def test_the_documented_job_trains_one_run_on_two_nodes_with_the_bytes_of_make(study):
    """With one gloo process a node, and the names of the nodes resolved to this machine."""
    text = (ROOT / "docs/distributed.md").read_text()
    (script,) = re.findall(r"^```\n(#!/bin/bash\n#SBATCH --nodes=2 .*?)^```", text, re.M | re.S)
    both = {"RA_MLA_ABLATION_MODE": None, "SINGLE_TRAINING": True, "GPUS": 2}
    job = study("", **both, GRAD_ACCUMULATION=1, CPU_THREADS=1)
    make = job.folder.start("all")
    assert make.wait() == 0, make.stderr
    (run,) = job.runs
    made = {name: (run.path / name).read_bytes() for name in DETERMINISTIC}
    run.path.rename(run.path.with_name("made"))
    log = job.folder.path / "srun.log"
    changes = {
        " --gres=gpu:4": f" --output={log}",
        "--nproc-per-node=4": "--nproc-per-node=1",
        "$host:29500": f"127.0.0.1:{free_ports(1)[0]}",
        "torchrun ": f"{sys.executable} -m torch.distributed.run ",
        "gpt2/train_ra_mla.py": f"{ROOT}/gpt2/train_ra_mla.py",
        " --ra-mla-ablation-step 0": "",
        "-O BUILD": f"-O {job.folder.path} --allow-dirty",
    }
    for old, new in changes.items():
        assert old in script, old
        script = script.replace(old, new)
    file = job.folder.path / "job.sh"
    file.write_text(script)
    export = f"ALL,GLOO_SOCKET_IFNAME=lo,PYTHON_EXEC={job.folder.server.interpreter()}"
    job.cluster.command("sbatch", f"--export={export}", str(file))
    job.wait_for(lambda: not job.jobs())
    assert run.path.exists() and read_status(run).state is State.SUCCESS, log.read_text()
    assert {name: (run.path / name).read_bytes() for name in DETERMINISTIC} == made
    world = json.loads(run.manifest.read_text())["processes"]
    assert (world["world_size"], world["backend"]) == (2, "gloo")
