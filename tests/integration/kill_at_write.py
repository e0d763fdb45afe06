"""Train runs and kill them at a chosen system call that writes; run under kill_at_write.c.

``kill_at_write.py FOLDER RANKS COUNT SEED`` prints one JSON line: the number of calls of an undisturbed
run, and for each kill its call and whether the continued run has the bytes of the undisturbed one.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from gpt2.data.prepare import prepare_dataset
from gpt2.planning.plan import config_layers, make_plan
from lib.env.ranks import rank_environment
from tests.build_folder import write_build
from tests.fuzz.harness import become, load_mains
from tests.fuzz.study import SETTINGS

DETERMINISTIC = ("metrics.jsonl", "per_query.csv", "model.safetensors", "summary.json")


class Training:
    """One small training that is started again and again."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.tree, self.counter = folder / "build", folder / "counter"
        self.main: Callable[[], int] = load_mains()["train"]
        (self.tree / "text").mkdir(parents=True)
        for i in range(12):
            (self.tree / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)
        single = {"RA_MLA_ABLATION_MODE": None, "SINGLE_TRAINING": True, "GPUS": ranks}
        batch = {"BATCH_SIZE": 4 // ranks, "OOM_FALLBACK": False}
        settings = {**SETTINGS, **single, **batch}
        write_build(self.tree, {k: v for k, v in settings.items() if v is not None})
        plan = make_plan(config_layers(self.tree), self.tree)
        (self.run,) = (run.path for run in plan.runs)
        if os.fork() == 0:
            prepare_dataset(plan.base.data, self.tree)
            os._exit(0)
        os.wait()

    def train(self, kill_at: int) -> int:
        """Train until the end or until call ``kill_at``; return the number of calls."""
        self.counter.write_bytes(bytes(8))
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
        (self.folder / "meeting").mkdir()
        leader = os.fork()
        if leader == 0:
            self._lead(kill_at)
        status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
        calls = int.from_bytes(self.counter.read_bytes(), sys.byteorder)
        # Telemetry writes by the clock: another run may end a few calls earlier.
        killed = bool(kill_at) and calls >= kill_at
        assert status == (-9 if killed else 0), (
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
        )
        ranks = []
        for rank in range(self.ranks):
            meeting = self.folder / "meeting/rendezvous"
            (self.folder / f"rank{rank}").mkdir(exist_ok=True)
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.environ.update(rank_environment(rank, self.ranks, meeting))
                become(self.main, ["train", "-O", str(self.tree)], self.folder / f"rank{rank}")
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        os._exit(max(map(abs, codes)))

    def outcome(self) -> dict[str, bytes]:
        """Return the deterministic files of the run; of the summary, without times."""
        files = {name: (self.run / name).read_bytes() for name in DETERMINISTIC}
        summary = json.loads(files["summary.json"])
        return {**files, "summary.json": json.dumps(summary["final"], sort_keys=True).encode()}


def main() -> None:
    """Run the command line."""
    folder, ranks, count, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    training = Training(folder, ranks)
    calls = training.train(0)
    whole = training.outcome()
    chance = random.Random(seed)
    spread = [1 + i * (calls - 2) // max(1, count - 1) for i in range(count)] if not seed else []
    kills = {}
    for call in spread or chance.sample(range(1, calls), count):
        shutil.rmtree(training.tree / "results")
        training.train(call)
        training.train(0)
        kills[call] = training.outcome() == whole
    print(json.dumps({"calls": calls, "kills": kills}))


if __name__ == "__main__":
    main()
