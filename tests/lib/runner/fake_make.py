"""Parent process of a fake study: ``fake_make.py FOLDER OPTIONS-AS-JSON``."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import cli
from lib.plan import Run, Variant, plan_runs
from lib.rundir import RunDir
from lib.runner import team
from lib.runner.pool import Pool
from lib.runner.runner import Options, run_all


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

    def preflight(self, pool: Pool, runs: list[Run[FakeConfig]]) -> Any:
        allowed = self._options.get("device", True)
        return pool.call("fake_target:check", allowed, self._options.get("slots", 1))

    def bytes_needed(self, runs: list[Run[FakeConfig]], jobs: int) -> int:
        return int(self._options.get("bytes", 0))

    def differences(self, run: RunDir) -> list[str]:
        return list(self._options.get("changed", []))

    def prepare(self, run: Run[FakeConfig]) -> None:
        behaviour = {
            "steps": 3,
            "step_seconds": 0.01,
            "healed": str(self.build_dir / "healed"),
            **self._options.get("all", {}),
            **self._options.get("runs", {}).get(run.variant.slug, {}),
        }
        (run.path / "behaviour.json").write_text(json.dumps(behaviour))

    def processes(self, run: Run[FakeConfig]) -> int:
        return int(self._options.get("processes", 1))

    def environment(self, run: Run[FakeConfig]) -> dict[str, str]:
        return {}


def main() -> int:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    names = options.get("names", ["a", "b", "c"])
    block = [(Variant(name, number=i), FakeConfig(name)) for i, name in enumerate(names)]
    runs = plan_runs("fake", folder / "results", {1: block})
    team.GRACE_SECONDS = options.get("grace", team.GRACE_SECONDS)
    team.FAREWELL_SECONDS = options.get("farewell", team.FAREWELL_SECONDS)
    pool = Pool(("lib.runner.runner",), {})
    runner_options = Options(
        options.get("jobs", 0), options.get("stale", ""), options.get("keep_going", True)
    )
    return run_all(runs, folder / "results/fake", FakeTarget(folder, options), pool, runner_options)


if __name__ == "__main__":
    cli.run(main)
