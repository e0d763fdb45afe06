"""Parent process of a fake study: ``fake_make.py FOLDER OPTIONS-AS-JSON``."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import console
from lib.plan.run import PlannedRun, RunVariant, build_runs
from lib.runner import pool as runner_pool
from lib.runner.pool import WorkerPool
from lib.runner.runner import RunnerOptions, run_all
from lib.runs.run_dir import RunDir


@dataclass(frozen=True)
class FakeConfig:
    """Configuration that consists of a name."""

    name: str

    @property
    def hash8(self) -> str:
        return self.name

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


class FakeTarget:
    """Target that trains with ``fake_target.train``; options control the behaviour of each run."""

    function = "fake_target:train"
    arguments: dict[str, Any] = {}

    def __init__(self, build_dir: Path, options: dict[str, Any]) -> None:
        self.build_dir = build_dir
        self._options = options

    def preflight(self, pool: WorkerPool, runs: list[PlannedRun[FakeConfig]]) -> Any:
        allowed = self._options.get("device", True)
        return pool.call("fake_target:check", allowed, self._options.get("slots", 1))

    def bytes_needed(self, runs: list[PlannedRun[FakeConfig]], jobs: int) -> int:
        return int(self._options.get("bytes", 0))

    def differences(self, run: RunDir) -> list[str]:
        return list(self._options.get("changed", []))

    def prepare(self, run: PlannedRun[FakeConfig]) -> None:
        behaviour = {
            "steps": 3,
            "step_seconds": 0.01,
            "healed": str(self.build_dir / "healed"),
            **self._options.get("all", {}),
            **self._options.get("runs", {}).get(run.variant.slug, {}),
        }
        (run.path / "behaviour.json").write_text(json.dumps(behaviour))

    def processes(self, run: PlannedRun[FakeConfig]) -> int:
        return int(self._options.get("processes", 1))

    def environment(self, run: PlannedRun[FakeConfig]) -> dict[str, str]:
        return {}


def main() -> int:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    names = options.get("names", ["a", "b", "c"])
    block = [(RunVariant(name, number=i), FakeConfig(name)) for i, name in enumerate(names)]
    runs = build_runs("fake", folder / "results", {1: block})
    runner_pool.EXIT_TIMEOUT_SECONDS = options.get("grace", runner_pool.EXIT_TIMEOUT_SECONDS)
    runner_pool.MAIN_RANK_EXIT_TIMEOUT_SECONDS = options.get(
        "farewell", runner_pool.MAIN_RANK_EXIT_TIMEOUT_SECONDS
    )
    pool = WorkerPool(("lib.runner.runner",), {})
    runner_options = RunnerOptions(
        options.get("jobs", 0), options.get("stale", ""), options.get("keep_going", True)
    )
    return run_all(runs, folder / "results/fake", FakeTarget(folder, options), pool, runner_options)


if __name__ == "__main__":
    console.run_main(main)
