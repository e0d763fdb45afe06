"""Lease of a run: the one process, on any machine that shares the folder, that may write the run.

A lease is the file ``.lease-N`` in the run directory, and the highest N counts. Whoever creates the
next number exclusively has the lease, also over NFS. The lower files are then removed, so that a former
holder notices before its next write. A released lease stays, so that the numbers grow.

The holder renews the time of the file. No clocks are compared: a process takes over a lease that it
has seen unchanged for the time that the lease states, and at once that of a dead process of this
machine.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from lib.env.gpu import booted_machine
from lib.errors import ConfigError, KablateError, Problem
from lib.files import is_alive, no_follow, write_atomic
from lib.json_files import RecordError, read_json_object, typed
from lib.runs.run_dir import RunDir

SCHEMA_VERSION = 1
# A lease may be taken over after this time without a renewal, unless LEASE_SECONDS is set.
DEFAULT_SECONDS = 60
# Renewals in that time.
_RENEWALS = 6
# Whether a lease is not held or not renewed in its time, seen renewed, or neither, yet.
Observed = Literal["free", "held", "unknown"]


class LeaseLost(KablateError):
    """The run has been taken over by another process: this one must not write to it any more."""


@dataclass(frozen=True)
class Holder:
    """Content of a lease: the process that starts the run (``runner``), and the one that trains it."""

    # Distinguishes leases with the same number, of run directories that were moved.
    id: str
    host: str
    # Machine and process namespace, inside which a process id and its start time are unique.
    machine: str
    seconds: int
    runner: int
    runner_start: int
    worker: int = 0
    worker_start: int = 0
    # Job of a batch system; "" outside.
    job: str = ""
    free: bool = False


@dataclass(frozen=True)
class LeaseRecord:
    """The current lease of a run; ``holder`` is None while it is written, or if it is damaged."""

    token: int
    holder: Holder | None
    # Modification time in nanoseconds, by the clock of the file server.
    renewed_at: int

    @property
    def seconds(self) -> int:
        return self.holder.seconds if self.holder else DEFAULT_SECONDS

    @property
    def is_local(self) -> bool:
        return self.holder is not None and self.holder.machine == booted_machine()

    @property
    def is_free(self) -> bool:
        """Return whether the lease was released, or all processes of its holder are known to be dead."""
        if not (by := self.holder):
            return False
        processes = (by.runner, by.runner_start), (by.worker, by.worker_start)
        alive = any(pid and _start_time(pid) == at for pid, at in processes)
        return by.free or (self.is_local and not alive)

    def __str__(self) -> str:
        if not self.holder:
            return "another process"
        job = f" (job {self.holder.job})" if self.holder.job else ""
        return f"{self.holder.host} process {self.holder.runner}{job}"


def read_lease(run: RunDir) -> LeaseRecord | None:
    token = max(run.leases(), default=0)
    return _read(run, token) if token else None


def current_holder(run: RunDir) -> LeaseRecord | None:
    """Return the lease under which ``run`` is being trained, for display.

    A holder on another machine is judged by this machine's clock.
    """
    lease = read_lease(run)
    if lease is None or lease.is_free:
        return None
    fresh = time.time() - lease.renewed_at / 1e9 < lease.seconds
    return lease if fresh or lease.is_local else None


def require_free(run: RunDir) -> None:
    """Raise ConfigError naming the holder if ``run`` is being trained."""
    if lease := current_holder(run):
        what = f"{lease} is training this run"
        advice = "wait until it ends, or type: make stop"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.locked"))


def no_guard() -> None:
    """Do nothing: the guard of a process that needs no lease."""


@contextmanager
def take_lease(run: RunDir, seconds: int) -> "Iterator[Callable[[], None]]":
    """Hold the lease in the context, which gets the guard that raises LeaseLost. Raises ConfigError."""
    require_free(run)
    lease = Lease.take(run, seconds, read_lease(run))
    if lease is None:
        require_free(run)
        raise _lost(run)
    try:
        with lease.renewing():
            yield lease.require
    finally:
        lease.release()


def guard_of_other_ranks(run: RunDir, token: int = 0) -> Callable[[], None]:
    """Return the guard of a process that writes under the lease of rank 0, and does not renew it.

    The lease is that of ``token``, or the current one at the first call.
    """

    @functools.cache
    def shared() -> Lease:
        return Lease.shared(run, token or max(run.leases(), default=0))

    # Rank 0 may end, and release the lease, while another rank writes its last line.
    return lambda: shared().require(or_released=True)


class LeaseObserver:
    """Observer of the leases of other processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Does not count the time of a suspended machine.
        self._clock = clock
        # Run → the lease and when it was first seen, and whether it has been renewed since.
        self._seen: dict[Path, tuple[LeaseRecord, float, bool]] = {}

    def look(self, run: RunDir) -> tuple[LeaseRecord | None, Observed]:
        """Return the lease of ``run``, and whether another process may take it."""
        lease, now = read_lease(run), self._clock()
        if lease is None or lease.is_free:
            return lease, "free"
        before, since, renewed = self._seen.get(run.path, (lease, now, False))
        if before != lease:
            renewed, since = renewed or before.token == lease.token, now
        self._seen[run.path] = lease, since, renewed
        if now - since > lease.seconds:
            return lease, "free"
        return lease, "held" if renewed else "unknown"


class Lease:
    """Lease that this process holds, or shares with the process that it trains for."""

    def __init__(self, run: RunDir, token: int, holder: Holder) -> None:
        self._run = run
        self.token = token
        self._holder = holder

    @classmethod
    def take(cls, run: RunDir, seconds: int, expected: LeaseRecord | None) -> "Lease | None":
        """Take the lease after ``expected``; None if another process was faster."""
        token, pid = expected.token + 1 if expected else 1, os.getpid()
        holder = Holder(
            id=secrets.token_hex(8),
            host=platform.node(),
            machine=booted_machine(),
            seconds=seconds,
            runner=pid,
            runner_start=_start_time(pid),
            job=_job(),
        )
        try:
            descriptor = no_follow(run.lease(token), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return None
        with open(descriptor, "wb") as stream:
            stream.write(_content(holder))
        # A directory that changes while it is listed may seem to have no lease.
        if max(run.leases(), default=token) > token:
            run.lease(token).unlink(missing_ok=True)
            return None
        for lower in run.leases():
            if lower < token:
                # A folder in its place, in a damaged run directory.
                with contextlib.suppress(OSError):
                    run.lease(lower).unlink()
        return cls(run, token, holder)

    @classmethod
    def shared(cls, run: RunDir, token: int) -> "Lease":
        """Return the lease that another process took for this one. Raises LeaseLost."""
        record = _read(run, token)
        if record.holder is None:
            raise _lost(run)
        lease = cls(run, token, record.holder)
        lease.require()
        return lease

    @classmethod
    @contextmanager
    def adopt(cls, run: RunDir, token: int) -> "Iterator[Lease]":
        """Share the lease that the runner took, and renew it in the context. Raises LeaseLost."""
        lease, pid = cls.shared(run, token), os.getpid()
        lease._replace(worker=pid, worker_start=_start_time(pid))
        with lease.renewing():
            yield lease

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the lease in the context, from a thread: a step may take minutes."""
        stopped = threading.Event()

        def renew() -> None:
            # Signals are for the main thread, whose system calls they interrupt.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while not stopped.wait(self._holder.seconds / _RENEWALS):
                # A file system that fails for a moment; ``require`` decides at the next write.
                with contextlib.suppress(OSError, LeaseLost):
                    self.require()
                    os.utime(self._run.lease(self.token), follow_symlinks=False)

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def require(self, *, or_released: bool = False) -> None:
        """Raise LeaseLost if another process has taken over the run, or the lease was released.

        ``or_released`` accepts a released one that nobody has taken. Opens the file, since an NFS
        client revalidates its cache only then.
        """
        holder = _read(self._run, self.token).holder
        if holder is None or holder.id != self._holder.id or (holder.free and not or_released):
            raise _lost(self._run)
        if self._run.lease(self.token + 1).exists():
            raise _lost(self._run)

    def release(self) -> None:
        """Free the lease, unless another process has taken it."""
        # On a full disk, the record of a process that has ended is left, which counts as free.
        with contextlib.suppress(LeaseLost, OSError):
            self.require()
            self._replace(free=True)

    def _replace(self, **fields: object) -> None:
        # A full disk leaves the record before.
        self._holder = replace(self._holder, **fields)  # type: ignore[arg-type]
        write_atomic(self._run.lease(self.token), _content(self._holder))


def _content(holder: Holder) -> bytes:
    record = {**asdict(holder), "schema_version": SCHEMA_VERSION}
    return json.dumps(record, sort_keys=True).encode() + b"\n"


def _read(run: RunDir, token: int) -> LeaseRecord:
    path = run.lease(token)
    try:
        holder = typed(Holder, read_json_object(path), path, ())
    except RecordError:
        holder = None
    try:
        # After the file was opened: see ``Lease.require``.
        return LeaseRecord(token, holder, path.lstat().st_mtime_ns)
    except OSError:
        return LeaseRecord(token, None, 0)


def _lost(run: RunDir) -> LeaseLost:
    what = f"taken over by {read_lease(run) or 'another process'}; nothing more was written"
    return LeaseLost(Problem(what, code="run.lease-lost"))


def _start_time(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; -1 if it has ended.

    Returns 0 on a system without /proc.
    """
    try:
        # Skip the process name, which is in parentheses and may contain any character.
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0 if not os.path.exists("/proc/self/stat") and is_alive(pid) else -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _job() -> str:
    """Return the id of the SLURM job of this process, as squeue shows it; "" outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
