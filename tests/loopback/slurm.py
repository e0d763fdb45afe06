"""A SLURM cluster on the loopback interface: the real slurmctld, and a real slurmd for each node.

Requires Debian's package slurm-wlm, whose slurmd may run several times on one host. Nothing outside the
folder of the cluster is read or written, and no daemon survives the context.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdTimeout=10
KillWait=10
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2
"""
_PATIENCE_SECONDS = 30
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")


def is_installed() -> bool:
    return all(shutil.which(name) for name in PROGRAMS)


class ClusterNotStarted(Exception):
    """The daemons run, but not every node became idle in time."""


class SlurmCluster:
    """A running cluster of ``nodes`` nodes, with ``cores`` cores each."""

    def __init__(self, folder: Path, nodes: int = 2, cores: int = 1) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = folder / "slurm.conf"
        self.nodes = [f"n{i}" for i in range(nodes)]
        (folder / "state").mkdir()
        host, ports = socket.gethostname().split(".")[0], free_ports(nodes + 1)
        lines = []
        for name, port in zip(self.nodes, ports[1:], strict=True):
            (folder / f"spool-{name}").mkdir()
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName={name} {place} CPUs={cores} State=UNKNOWN")
        self.conf.write_text(
            _CONF.format(
                host=host,
                port=ports[0],
                user=getpass.getuser(),
                folder=folder,
                nodes="\n".join(lines),
            )
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which a command finds the cluster."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        return {**outside, "SLURM_CONF": str(self.conf)}

    def start_controller(self) -> None:
        self._start("slurmctld", "-D")

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, key=name)

    def kill(self, name: str) -> None:
        """Kill slurmctld, or the slurmd of a node; its jobs stay."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def command(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._idle() < len(self.nodes):
            if time.monotonic() > deadline:
                log = self._folder / "slurmctld.log"
                raise ClusterNotStarted(log.read_text()[-500:] if log.exists() else "no log")
            time.sleep(0.1)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.command("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
            self.command("scancel", f"--user={getpass.getuser()}")
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while self.command("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(_PATIENCE_SECONDS)

    def _idle(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.command("sinfo", "-N", "-h", "-p", "main", "-o", "%T").split().count("idle")
        return 0

    def _start(self, *words: str, key: str = "") -> None:
        with open(self._folder / f"{key or words[0]}.out", "ab") as out:
            self._daemons[key or words[0]] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 2, cores: int = 1) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, nodes, cores)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
