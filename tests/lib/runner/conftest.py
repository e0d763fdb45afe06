"""Study of fake runs, started in a separate process like make."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lib.runs.run_dir import RunDir, RunStatus, read_status
from tests.command_server import Command, CommandServer

_SCRIPT = Path(__file__).with_name("fake_make.py")
_PATIENCE_SECONDS = 30.0


@dataclass
class FakeStudy:
    """Starts ``fake_make.py`` in a folder and inspects the results."""

    folder: Path
    server: CommandServer
    scratch: Path
    started: list[Command] = field(default_factory=list)

    def start(self, **options: Any) -> Command:
        """Start a make in a separate process group, as a terminal does."""
        environment = {k: v for k, v in os.environ.items() if k not in ("V", "CI", "NO_COLOR")}
        command = [str(_SCRIPT), str(self.folder), json.dumps(options)]
        process = self.server.start(command, environment, self.scratch)
        self.started.append(process)
        return process

    def make(self, **options: Any) -> tuple[int, str]:
        """Run a whole make; return exit code and stderr."""
        return self.finish(self.start(**options))

    def finish(self, process: Command) -> tuple[int, str]:
        """Wait for a make to end; return exit code and stderr."""
        return process.wait(_PATIENCE_SECONDS), process.stderr

    def path(self, name: str) -> Path:
        return self.folder / f"results/fake/{name}-s1-{name}"

    def status(self, name: str) -> RunStatus | None:
        return read_status(RunDir(self.path(name)))

    def steps(self, name: str) -> list[int]:
        """Return the completed steps in order."""
        path = self.path(name) / "steps.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def journal(self) -> list[str]:
        """Return name and first step of every start of a run."""
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def study(tmp_path, tmp_path_factory, server) -> Iterator[FakeStudy]:
    fake_study = FakeStudy(tmp_path, server, tmp_path_factory.mktemp("streams"))
    yield fake_study
    for process in fake_study.started:
        process.kill()
