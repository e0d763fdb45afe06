"""Kill and resume: a study killed at any moment ends with the same bytes."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from lib.env.ranks import rank_environment
from lib.runs.lease import DEFAULT_SECONDS
from lib.runs.run_dir import RunDir, State, read_status
from tests.command_server import Command
from tests.integration.conftest import IN_PROCESS, SINGLE, Folder, wait_for
from tests.json_rows import read_rows

STEPS = "1,full"
DETERMINISTIC = ("metrics.jsonl", "per_query.csv", "model.safetensors")
INTERVALS = {"MAX_ITERS": 12, "CHECKPOINT_INTERVAL": 2, "EVAL_INTERVAL": 4, "EVAL_TOKENS": 256}


def outcome(folder: Path) -> dict[str, bytes]:
    """Return every deterministic file of every run."""
    runs = sorted((folder / "results/ratio").glob("*-s1-*"))
    assert runs, "no run to compare"
    return {
        f"{run.name}/{name}": (run / name).read_bytes() for run in runs for name in DETERMINISTIC
    }


def test_killed_and_resumed_equals_uninterrupted(build, tmp_path):
    """While a run saves; test_killed_in_a_write_and_resumed_equals_uninterrupted has other moments."""
    folder, study = build(**INTERVALS), tmp_path / "results/ratio"
    assert folder.start("all", STEPS=STEPS, JOBS="2").wait() == 0
    whole = outcome(folder.path)
    assert len(whole) == 2 * len(DETERMINISTIC)
    (folder.path / "results").rename(tmp_path / "uninterrupted")
    killed = folder.start("all", STEPS=STEPS, JOBS="2")
    wait_for(lambda: any(study.glob("*/checkpoints/.tmp-*")), killed)
    killed.kill()
    assert folder.start("all", STEPS=STEPS, JOBS="2").wait() == 0
    assert outcome(folder.path) == whole


def evaluates(study: Path) -> bool:
    """Return whether a run has trained up to an evaluation, and not recorded it."""
    last = [rows[-1] for path in study.glob("*/metrics.jsonl") if (rows := read_rows(path))]
    return any(
        r["kind"] == "train" and not r["iteration"] % INTERVALS["EVAL_INTERVAL"] for r in last
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
    assert team(ranks).same_after_kills("write", 2, "5") == [True] * 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["write", "time"])
def test_many_kills_leave_the_bytes_of_an_uninterrupted_run(team, ranks, kind):
    """COUNT kills at writes, and half as many at moments."""
    count = int(os.environ.get("COUNT") or 100) // (1 if kind == "write" else 2)
    same = team(ranks).same_after_kills(kind, count, os.environ.get("SEED") or "1")
    assert same == [True] * count


# Batches of an evaluation and tokens of a sample take long enough that stops fall into them.
STOPPED = {**SINGLE, **INTERVALS, "MAX_ITERS": 24, "EVAL_TOKENS": 1024, "SAMPLE_TOKENS": 100}


def stop(process: Command, run: RunDir, way: str) -> None:
    """Request a stop as a terminal, a batch system or ``make stop`` does."""
    if way == "make stop" and run.path.exists():
        run.stop_request.touch()
    else:
        everyone = process.processes() if way in ("Ctrl-C", "to all") else [process.pid]
        signal_all(everyone, signal.SIGINT if way == "Ctrl-C" else signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_stops_leave_the_bytes_of_an_uninterrupted_run(build, ranks):
    """COUNT stops: in turn while it evaluates, saves, samples, and anywhere."""
    count, chance = int(os.environ.get("COUNT") or 100), Random(os.environ.get("SEED") or "1")
    folder = build(**STOPPED, GPUS=ranks, GRAD_ACCUMULATION=2 // ranks)
    (run,) = map(RunDir, folder.runs(""))
    began, files = time.monotonic(), (*DETERMINISTIC, "sample.txt")
    assert folder.start("all").wait() == 0
    seconds, whole = time.monotonic() - began, {n: (run.path / n).read_bytes() for n in files}
    moments = (
        lambda: evaluates(run.path.parent),
        lambda: any(run.checkpoints.glob(".tmp-*")),
        lambda: run.per_query.exists(),
        lambda: time.monotonic() > ended,
    )
    for number in range(count):
        shutil.rmtree(folder.path / "results")
        ended, way = (
            time.monotonic() + chance.random() * seconds,
            chance.choice(("Ctrl-C", "to make", "to all", "make stop")),
        )
        process = folder.start("all")
        while not moments[number % len(moments)]() and process.poll() is None:
            time.sleep(0.001)
        stop(process, run, way)
        # A signal that arrives before the command handles it ends the command.
        assert process.wait() in (0, 130, 143, -signal.SIGTERM, -signal.SIGINT), process.stderr
        again = folder.start("all")
        assert again.wait() == 0, again.stderr
        assert {n: (run.path / n).read_bytes() for n in files} == whole, (number, way)


def signal_all(processes: list[int], number: int) -> None:
    """Send a signal to the processes that are still alive."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
