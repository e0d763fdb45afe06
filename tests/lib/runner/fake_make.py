"""Parent process of a fake study: ``fake_make.py FOLDER OPTIONS-AS-JSON``."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_train

from lib import console
from lib.runner import local
from lib.runner.local import DeviceSlot, Job, LocalExecutor
from lib.runner.runner import RunnerOptions, run_all
from lib.runner.worker import train_worker
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant, build_runs
from lib.runs.run_dir import State


@dataclass(frozen=True)
class FakeConfig:
    """Configuration that consists of a name."""

    name: str

    @property
    def hash8(self) -> str:
        return self.name

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


class FakeBackend:
    """Backend that trains with ``fake_train.train``; options control the behaviour of each run."""

    def __init__(self, folder: Path, executor: LocalExecutor, options: dict[str, Any]) -> None:
        self._folder = folder
        self.executor = executor
        self._options = options

    def preflight(self, runs: list[Run[FakeConfig]], jobs: int) -> Any:
        return [{"FAKE_SLOT": str(i)} for i in range(self._options.get("slots", 1))]

    def drift(self, record: RunRecord) -> list[str]:
        return list(self._options.get("changed", []))

    def lost_gpu(self, slot: DeviceSlot) -> str:
        return ""

    def submit(self, run: Run[FakeConfig], slot: DeviceSlot, token: int) -> Job:
        behaviour = {
            "steps": 3,
            "step_seconds": 0.01,
            "fail_at": 0,
            "fails_by": "",
            "journal": str(self._folder / "journal"),
            "healed": str(self._folder / "healed"),
            **self._options.get("all", {}),
            **self._options.get("runs", {}).get(run.variant.slug, {}),
        }
        (run.path / "behaviour.json").write_text(json.dumps(behaviour))
        return self.executor.submit(
            train_worker,
            fake_train.train,
            run.path,
            token,
            world_size=int(self._options.get("processes", 1)),
            environment=slot,
        )


def main() -> int:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    names = options.get("names", ["a", "b", "c"])
    block = [(RunVariant(name, number=i), FakeConfig(name)) for i, name in enumerate(names)]
    runs = build_runs("fake", folder / "results", {1: block})
    local.EXIT_TIMEOUT_SECONDS = options.get("grace", local.EXIT_TIMEOUT_SECONDS)
    local.MAIN_RANK_EXIT_TIMEOUT_SECONDS = options.get(
        "farewell", local.MAIN_RANK_EXIT_TIMEOUT_SECONDS
    )
    executor = LocalExecutor(("lib.runner.runner",), {})
    backend = FakeBackend(folder, executor, options)
    runner_options = RunnerOptions(
        options.get("jobs", 0),
        options.get("stale", "stop"),
        options.get("keep_going", True),
        commands={State(name): words for name, words in options.get("commands", {}).items()},
        stall_limit=options.get("silent", 0),
        lease_seconds=options.get("lease", 60),
        wait=options.get("wait", True),
    )
    return run_all(runs, folder / "results/fake", backend, runner_options)


if __name__ == "__main__":
    console.run_main(main)
