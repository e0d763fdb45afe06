"""Kill and resume: a study killed at any moment ends with the same bytes."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from lib.env.ranks import rank_environment
from lib.runs.lease import DEFAULT_SECONDS
from lib.runs.run_dir import RunDir, State, read_status
from tests.command_server import Command
from tests.integration.conftest import IN_PROCESS, SINGLE, Folder, wait_for

STEPS = "1,full"
DETERMINISTIC = ("metrics.jsonl", "per_query.csv", "model.safetensors")
INTERVALS = {"MAX_ITERS": 12, "CHECKPOINT_INTERVAL": 2, "EVAL_INTERVAL": 4, "EVAL_TOKENS": 256}


def start(folder: Folder, jobs: int) -> Command:
    """Start the runner."""
    return folder.start("all", STEPS=STEPS, JOBS=str(jobs))


def kill_when(process: Command, moment: Callable[[], bool]) -> bool:
    """Wait for the moment, then kill; return whether the process was still running."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not moment():
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.001)
    ended = process.poll() is not None
    process.kill()
    return not ended


def outcome(folder: Path) -> dict[str, bytes]:
    """Return every deterministic file of every run."""
    runs = sorted((folder / "results/ratio").glob("*-s1-*"))
    assert runs, "no run to compare"
    return {
        f"{run.name}/{name}": (run / name).read_bytes() for run in runs for name in DETERMINISTIC
    }


def test_killed_and_resumed_equals_uninterrupted(build, tmp_path):
    folder = build(**INTERVALS)
    assert start(folder, 2).wait() == 0
    whole = outcome(folder.path)
    assert len(whole) == 2 * len(DETERMINISTIC)
    (folder.path / "results").rename(tmp_path / "uninterrupted")
    study = folder.path / "results/ratio"

    def rows() -> int:
        return sum(path.read_bytes().count(b"\n") for path in study.glob("*/metrics.jsonl"))

    # While saving, and anywhere.
    assert kill_when(start(folder, 2), lambda: any(study.glob("*/checkpoints/.tmp-*")))
    assert kill_when(start(folder, 2), lambda: rows() >= 13)
    assert start(folder, 2).wait() == 0
    assert outcome(folder.path) == whole


def last_rows(study: Path) -> Iterator[dict]:
    """Return the last complete record of each started run."""
    for path in study.glob("*/metrics.jsonl"):
        whole = path.read_bytes().rpartition(b"\n")[0]
        if whole:
            yield json.loads(whole.rpartition(b"\n")[2])


def evaluates(study: Path) -> bool:
    """Return whether a run has trained up to an evaluation, and not recorded it."""
    return any(
        row["kind"] == "train" and row["iteration"] % INTERVALS["EVAL_INTERVAL"] == 0
        for row in last_rows(study)
    )


def test_a_signal_to_every_process_saves_the_run_and_loses_no_sidecar(build):
    """As a batch system preempts a job."""
    folder = build(MAX_ITERS=100_000, LOADER_WORKERS=1, TELEMETRY_INTERVAL=1, LOG_INTERVAL=1)
    (run,) = map(RunDir, folder.runs("0"))
    make = folder.start("all", STEPS="0")
    wait_for(lambda: run.metrics.exists() and run.metrics.read_bytes().count(b"\n") >= 3, make)
    everyone = [make.pid]
    for process in everyone:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            everyone += map(int, children.read_text().split())
    signal_all(everyone, signal.SIGTERM)
    assert make.wait() == 128 + signal.SIGTERM, make.stderr
    status = read_status(run)
    assert status and status.state is State.INTERRUPTED, status
    assert "is lost" not in make.stderr


class Team:
    """A small training of one or two ranks that is started again and again, under write_faults.c."""

    def __init__(self, folder: Folder, ranks: int, preloaded: Path) -> None:
        self.folder, self.ranks, self.preloaded = folder, ranks, preloaded
        self.counter = folder.scratch / "counter"
        (self.run,) = folder.runs("")

    def train(self, kill_at: int = 0, seconds: float = 120) -> int:
        """Train until the end, call ``kill_at`` that writes, or a moment; return the number of calls."""
        self.counter.write_bytes(bytes(8))
        meeting = self.folder.scratch / "rendezvous"
        meeting.unlink(missing_ok=True)
        fault = {"KILL_ROOT": str(self.folder.path / "results"), "KILL_COUNTER": str(self.counter)}
        fault |= {"KILL_AT": str(kill_at), "LD_PRELOAD": str(self.preloaded)}
        ended = time.monotonic() + seconds
        team = [
            self.folder.start(*IN_PROCESS, **rank_environment(rank, self.ranks, meeting), **fault)
            for rank in range(self.ranks)
        ]
        late = False
        while any(process.poll() is None for process in team):
            late = time.monotonic() > ended
            if late or 0 < kill_at <= self.calls():
                for process in team:
                    process.kill()
            time.sleep(0.001)
        # The library kills the group of one rank, whose other processes may end after it.
        for process in team:
            process.kill()
        killed = late or 0 < kill_at <= self.calls()
        assert killed or {process.wait() for process in team} == {0}, team[0].stderr
        return self.calls()

    def calls(self) -> int:
        """Return the number of calls below the results so far, of all ranks and sidecars."""
        return int.from_bytes(self.counter.read_bytes(), sys.byteorder)

    def outcome(self) -> dict[str, bytes]:
        """Return the deterministic files of the run; of the summary, without times."""
        final = json.loads((self.run / "summary.json").read_text())["final"]
        files = {name: (self.run / name).read_bytes() for name in DETERMINISTIC}
        return {**files, "summary.json": json.dumps(final, sort_keys=True).encode()}

    def same_after_kills(self, kind: str, count: int, seed: str) -> list[bool]:
        """Spread the kills over a run; return for each whether the resumed run has the same bytes."""
        began = time.monotonic()
        calls = self.train()
        seconds, whole, chance, same = time.monotonic() - began, self.outcome(), Random(seed), []
        for number in range(count):
            place = (number + chance.random()) / count
            # A kill in the first moments leaves no folder.
            shutil.rmtree(self.folder.path / "results", ignore_errors=True)
            if kind == "write":
                self.train(kill_at=1 + int(place * (calls - 1)))
            else:
                self.train(seconds=place * seconds)
            # A lease that was being written names no holder, and counts as held for this long.
            for lease in self.run.glob(".lease-*"):
                os.utime(lease, times=(0, time.time() - DEFAULT_SECONDS))
            self.train()
            same.append(self.outcome() == whole)
        return same


@pytest.fixture
def team(build, write_faults) -> Callable[[int], Team]:
    if write_faults is None:
        pytest.skip("requires a C compiler")

    def prepare(ranks: int) -> Team:
        settings = {"GPUS": ranks, "BATCH_SIZE": 4 // ranks, "GRAD_ACCUMULATION": 1}
        settings |= {"EVAL_INTERVAL": 4, "CHECKPOINT_INTERVAL": 2, "MAX_ITERS": 8}
        folder = build(**SINGLE, **settings, OOM_FALLBACK=False, TELEMETRY_INTERVAL=10)
        return Team(folder, ranks, write_faults)

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_in_a_write_and_resumed_equals_uninterrupted(team, ranks):
    """The first half of the bytes reaches the file."""
    assert team(ranks).same_after_kills("write", 3, "5") == [True] * 3


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["write", "time"])
def test_many_kills_leave_the_bytes_of_an_uninterrupted_run(team, capsys, ranks, kind):
    """COUNT kills at writes, and half as many at moments."""
    count = int(os.environ.get("COUNT") or 100) // (1 if kind == "write" else 2)
    same = team(ranks).same_after_kills(kind, count, os.environ.get("SEED") or "1")
    with capsys.disabled():
        sys.stdout.write(f"{ranks} ranks, {kind}, same bytes: {sum(same)}/{count}\n")
    assert same == [True] * count


# Batches of an evaluation and tokens of a sample take long enough that stops fall into them.
STOPPED = {**SINGLE, **INTERVALS, "MAX_ITERS": 24, "EVAL_TOKENS": 1024, "SAMPLE_TOKENS": 100}
MOMENTS = ("starting", "evaluating", "saving", "sampling", "elsewhere")


def stop(process: Command, run: RunDir, way: str) -> None:
    """Request a stop as a terminal, a batch system or ``make stop`` does."""
    if way == "Ctrl-C":
        signal_all(process.processes(), signal.SIGINT)
    elif way == "make stop" and run.path.exists():
        run.stop_request.touch()
    else:
        signal_all(process.processes() if way == "to all" else [process.pid], signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_stops_leave_the_bytes_of_an_uninterrupted_run(build, capsys, ranks):
    """COUNT stops: in turn while it starts, evaluates, saves, samples, and anywhere."""
    count = int(os.environ.get("COUNT") or 100)
    chance = Random(f"{os.environ.get('SEED') or 1} {ranks}")
    folder = build(**STOPPED, GPUS=ranks, GRAD_ACCUMULATION=2 // ranks)
    script, (run,) = "all", map(RunDir, folder.runs(""))
    began = time.monotonic()
    assert folder.start(script).wait() == 0
    seconds, files = time.monotonic() - began, (*DETERMINISTIC, "sample.txt")
    whole, equal, reached = {n: (run.path / n).read_bytes() for n in files}, 0, Counter()
    for number in range(count):
        shutil.rmtree(folder.path / "results")
        kind = MOMENTS[number % len(MOMENTS)]
        began, share, rows = time.monotonic(), chance.random(), chance.randrange(24)

        def moment() -> bool:
            if kind == "elsewhere":
                return time.monotonic() > began + share * seconds
            if kind == "starting":
                return time.monotonic() > began + share * seconds / 2
            if kind == "sampling":
                return run.per_query.exists()
            if not run.metrics.exists() or run.metrics.read_bytes().count(b"\n") < rows:
                return False
            if kind == "saving":
                return any(run.checkpoints.glob(".tmp-*"))
            return evaluates(run.path.parent)

        process = folder.start(script)
        while not moment() and process.poll() is None:
            time.sleep(0.001)
        way = chance.choice(("Ctrl-C", "to make", "to all", "make stop"))
        stop(process, run, way)
        code = process.wait()
        # A signal that arrives before the command handles it ends the command.
        assert code in (0, 130, 143, -signal.SIGTERM, -signal.SIGINT), (code, process.stderr)
        reached[f"{kind}: {'stopped' if code else 'ended'}"] += 1
        again = folder.start(script)
        assert again.wait() == 0, again.stderr
        same = {n: (run.path / n).read_bytes() for n in files} == whole
        equal += same
        with capsys.disabled():
            sys.stdout.write(
                f"{ranks} ranks, {kind}, {way}: {code} {'same' if same else 'OTHER'}\n"
            )
    with capsys.disabled():
        sys.stdout.write(f"{ranks} ranks, same bytes: {equal}/{count} {dict(reached)}\n")
    assert equal == count


def signal_all(processes: list[int], number: int) -> None:
    """Send a signal to the processes that are still alive."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
