"""Parent process of a fake study: ``fake_make.py FOLDER OPTIONS-AS-JSON``."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_train

from lib import console
from lib.runner import local
from lib.runner.local import DeviceSlot, Job, LocalExecutor
from lib.runner.runner import RunnerOptions, run_all
from lib.runner.worker import train_worker
from lib.runs.run import Run, RunVariant, build_runs
from lib.runs.run_dir import State

# Options that are neither those of the runner nor of this backend.
TIMEOUTS = {"grace": "EXIT_TIMEOUT_SECONDS", "farewell": "MAIN_RANK_EXIT_TIMEOUT_SECONDS"}


class FakeBackend:
    """Backend that trains with ``fake_train.train``; options control the behaviour of each run."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self.executor = LocalExecutor(("lib.runner.runner",), {})
        self.preflight = lambda runs, jobs: [{"FAKE_SLOT": "0"}]
        self.drift = lambda record: list(options.get("changed", []))
        self.lost_gpu = lambda slot: ""

    def submit(self, run: Run[Any], slot: DeviceSlot, token: int) -> Job:
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
        processes = self._options.get("processes", 1)
        return self.executor.submit(
            *(train_worker, fake_train.train, run.path, token), world_size=processes
        )


def named(name: str) -> Any:
    """Return a configuration that consists of a name."""
    return SimpleNamespace(hash8=name, identity=lambda: {"name": name})


def main() -> int:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    names = options.get("names", ["a", "b", "c"])
    block = [(RunVariant(name, number=i), named(name)) for i, name in enumerate(names)]
    runs = build_runs("fake", folder / "results", {1: block})
    for name in TIMEOUTS.keys() & options:
        setattr(local, TIMEOUTS[name], options[name])
    ours = {field.name for field in dataclasses.fields(RunnerOptions)} & options.keys()
    given = {name: options[name] for name in ours}
    given["commands"] = {State(name): words for name, words in given.get("commands", {}).items()}
    backend: Any = FakeBackend(folder, options)
    return run_all(runs, folder / "results/fake", backend, RunnerOptions(**given))


if __name__ == "__main__":
    console.run_main(main)
