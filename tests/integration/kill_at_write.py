"""Train runs, and kill them at system calls that write or at moments; run under write_faults.c.

``kill_at_write.py FOLDER RANKS KIND COUNT SEED`` spreads the kills over the whole run. For each kill it
prints the call (KIND write) or second (KIND time) and whether the continued run has the bytes of an
undisturbed one. The last line has all of them as JSON, with the calls and seconds of that run.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from gpt2.data.prepare import prepare_dataset
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from lib.env.ranks import rank_environment
from tests.build_folder import write_build, write_texts
from tests.fuzz.harness import become, load_mains
from tests.fuzz.study import SETTINGS
from tests.integration.conftest import SINGLE

DETERMINISTIC = ("metrics.jsonl", "per_query.csv", "model.safetensors", "summary.json")


class Training:
    """One small training that is started again and again."""

    def __init__(self, folder: Path, ranks: int, **changes: SymbolValue) -> None:
        self.folder, self.ranks = folder, ranks
        self.tree, self.counter = folder / "build", folder / "counter"
        self.mains = load_mains()
        write_texts(self.tree)
        ranked = {"GPUS": ranks, "BATCH_SIZE": 4 // ranks, "OOM_FALLBACK": False}
        settings = {**SETTINGS, **SINGLE, **ranked, **changes}
        write_build(self.tree, {k: v for k, v in settings.items() if v is not None})
        plan = make_plan(config_layers(self.tree), self.tree)
        (self.run,) = (run.path for run in plan.runs)
        if os.fork() == 0:
            prepare_dataset(plan.base.data, self.tree)
            os._exit(0)
        os.wait()

    def train(self, kill_at: int = 0, seconds: float | None = None) -> int:
        """Train until the end, call ``kill_at`` or ``seconds``; return the number of calls."""
        self.counter.write_bytes(bytes(8))
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
        (self.folder / "meeting").mkdir()
        leader = os.fork()
        if leader == 0:
            self._lead(kill_at)
        if seconds is not None:
            kill_after(leader, seconds)
        status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
        calls = int.from_bytes(self.counter.read_bytes(), sys.byteorder)
        # Telemetry writes by the clock: another run may end a few calls earlier.
        killed = (bool(kill_at) and calls >= kill_at) or (seconds is not None and status != 0)
        assert status == (-signal.SIGKILL if killed else 0), (
            status,
            (self.folder / "rank0/stderr").read_text(),
        )
        return calls

    def _lead(self, kill_at: int) -> None:
        """Start all ranks in one process group, and exit when all have ended."""
        os.setsid()
        os.environ.update(
            KILL_ROOT=str(self.tree / "results"),
            KILL_COUNTER=str(self.counter),
            KILL_AT=str(kill_at),
            KILL_GROUP=str(os.getpid()),
        )
        ranks = []
        for rank in range(self.ranks):
            meeting = self.folder / "meeting/rendezvous"
            (self.folder / f"rank{rank}").mkdir(exist_ok=True)
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.environ.update(rank_environment(rank, self.ranks, meeting))
                become(
                    self.mains["gpt2.train_ra_mla"],
                    ["train_ra_mla", "--in-process", "-O", str(self.tree)],
                    self.folder / f"rank{rank}",
                )
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        os._exit(max(map(abs, codes)))

    def outcome(self) -> dict[str, bytes]:
        """Return the deterministic files of the run; of the summary, without times."""
        files = {name: (self.run / name).read_bytes() for name in DETERMINISTIC}
        summary = json.loads(files["summary.json"])
        return {**files, "summary.json": json.dumps(summary["final"], sort_keys=True).encode()}


def kill_after(leader: int, seconds: float) -> None:
    """Kill the process group of ``leader`` after ``seconds`` unless it has ended."""
    descriptor = os.pidfd_open(leader)
    if not select.select([descriptor], [], [], seconds)[0]:
        os.killpg(leader, signal.SIGKILL)
    os.close(descriptor)


def main() -> None:
    """Run the command line."""
    folder, ranks, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    count, seed = map(int, sys.argv[4:])
    training = Training(folder, ranks, MAX_ITERS=8)
    began = time.monotonic()
    calls = training.train()
    seconds = time.monotonic() - began
    whole = training.outcome()
    chance = random.Random(seed)
    kills = {}
    for number in range(count):
        place = (number + chance.random()) / count
        moment = 1 + int(place * (calls - 1)) if kind == "write" else place * seconds
        # A kill in the first moments leaves no folder.
        shutil.rmtree(training.tree / "results", ignore_errors=True)
        training.train(**{"kill_at" if kind == "write" else "seconds": moment})
        training.train()
        # Neighbours may be drawn at the same write.
        kills[number] = training.outcome() == whole
        print(
            f"{ranks} ranks, {kind} {moment:.6g}: {'same' if kills[number] else 'OTHER'} bytes",
            flush=True,
        )
    print(json.dumps({"calls": calls, "seconds": round(seconds, 3), "kills": kills}))


if __name__ == "__main__":
    main()
