"""Leases: one holder at a time, and a former holder notices before its next write."""

import json
import os
import resource
import time
from functools import partial
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.runs.lease import (
    Lease,
    LeaseLost,
    LeaseObserver,
    current_holder,
    guard_of_other_ranks,
    read_lease,
    require_free,
    take_lease,
)
from lib.runs.run_dir import RunDir

SECONDS = 60


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def edit(run, **fields):
    """Change fields of the current lease, as if another machine had written them."""
    path = run.lease(max(run.leases()))
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_numbers_grow_one_file_is_left_and_one_takes_the_lease_that_two_saw(run):
    for token in (1, 2, 3):
        seen = read_lease(run)
        lease = Lease.take(run, SECONDS, seen)
        assert lease is not None and lease.token == token and run.leases() == [token]
        assert Lease.take(run, SECONDS, seen) is None
        lease.require()
        lease.release()
        assert current_holder(run) is None


def adopt(lease, run):
    with Lease.adopt(run, lease.token):
        os._exit(1)


@pytest.mark.parametrize("write", [lambda lease, run: lease.release(), adopt])
def test_on_a_full_disk_the_record_before_is_left_and_a_dead_process_holds_nothing(run, write):
    process = os.fork()
    if process == 0:
        lease = Lease.take(run, SECONDS, None)
        # A file-size limit simulates a full disk: the write fails.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            write(lease, run)
        finally:
            os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    lease = read_lease(run)
    assert run.leases() == [1] and lease and lease.holder and not lease.holder.free
    require_free(run)
    assert lease.holder.runner == process and not lease.holder.worker


def test_a_former_holder_notices_and_releases_nothing(run):
    former = Lease.take(run, SECONDS, None)
    holder = Lease.take(run, SECONDS, read_lease(run))
    assert former and holder
    with pytest.raises(LeaseLost) as lost:
        former.require()
    assert lost.value.codes == ["run.lease-lost"] and str(os.getpid()) in str(lost.value)
    former.release()
    holder.require()
    # Also while both files exist.
    run.lease(1).write_bytes(run.lease(2).read_bytes())
    with pytest.raises(LeaseLost):
        former.require()
    # And in a new directory, in which another process has the same number.
    for token in (1, 2):
        run.lease(token).unlink()
    assert Lease.take(run, SECONDS, None)
    with pytest.raises(LeaseLost):
        former.require()


@pytest.mark.parametrize("token", [0, 3])
def test_another_rank_writes_while_rank_0_has_the_lease(run, token):
    # Made before rank 0 takes the lease.
    guard = guard_of_other_ranks(run, token)
    for _ in range(3):
        Lease.take(run, SECONDS, read_lease(run))
    guard()
    with Lease.adopt(run, 3) as lease:
        guard()
    lease.release()
    guard()
    Lease.take(run, SECONDS, read_lease(run))
    with pytest.raises(LeaseLost):
        guard()


def test_a_lease_is_free_once_runner_and_worker_are_dead(run):
    assert Lease.take(run, SECONDS, None)
    with Lease.adopt(run, 1) as lease:
        edit(run, runner=2**22 + 1)
        assert current_holder(run) is not None and LeaseObserver().look(run)[1] == "unknown"
        lease.require()
    # Another process with the number of the dead one, and a machine that cannot be looked at.
    edit(run, worker=os.getpid(), worker_start=1)
    assert current_holder(run) is None and LeaseObserver().look(run)[1] == "free"
    edit(run, machine="another")
    assert str(current_holder(run))


def test_without_clocks_a_silent_holder_loses_the_lease_and_a_renewed_one_does_not(run):
    assert Lease.take(run, SECONDS, None)
    edit(run, machine="another")
    now = 0.0
    observer = LeaseObserver(lambda: now)
    assert observer.look(run)[1] == "unknown"
    # Two hours in the future by this clock, or in the past: only a change counts.
    for seconds, at in ((SECONDS - 1, 1e9 + 7200), (SECONDS - 1, 1e9 - 7200), (SECONDS, None)):
        now += seconds
        if at:
            os.utime(run.lease(1), (at, at))
        assert observer.look(run)[1] == "held"
    now += 1
    lease, known = observer.look(run)
    assert known == "free" and Lease.take(run, SECONDS, lease)


@pytest.mark.parametrize(
    "plant",
    [
        *(partial(Path.write_bytes, data=each) for each in (b"", b"{", b'{"free": true}', b"\xff")),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
)
def test_what_is_no_lease_is_no_wait_and_taken_over_after_its_time(run, plant):
    plant(run.lease(3))
    now = 0.0
    observer = LeaseObserver(lambda: now)
    assert observer.look(run)[1] == "unknown"
    now += SECONDS + 1
    lease, known = observer.look(run)
    taken = Lease.take(run, SECONDS, lease)
    assert known == "free" and taken and taken.token == 4
    taken.require()


def test_a_lease_is_renewed_in_its_context(run):
    with take_lease(run, 1) as guard:
        before = read_lease(run)
        time.sleep(0.4)
        assert before and read_lease(run) != before
        guard()
        with pytest.raises(ConfigError) as locked:
            require_free(run)
        assert locked.value.codes == ["run.locked"]
    assert current_holder(run) is None
