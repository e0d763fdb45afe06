"""Build folders with a very small configuration and a few text files."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from tests.build_folder import write_build, write_texts
from tests.command_server import Command, CommandServer, words_of
from tests.integration.tree import commit_copy

SMALL: dict[str, SymbolValue] = {
    "DEVICE_CPU": True,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 96,
    "BLOCK_SIZE": 16,
    "TOKENIZER_BYTE": True,
    "DATASET_CUSTOM": True,
    "CUSTOM_PATH": "text",
    "VAL_FRACTION": "0.4",
    "EVAL_TOKENS": 64,
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "MAX_ITERS": 4,
    "WARMUP_STEPS": 1,
    "DROPOUT": "0.1",
    "SAMPLE_TOKENS": 8,
    # An interpreter for each run; tests of its files or its process set an interval.
    "TELEMETRY_INTERVAL": 0,
    "RA_MLA_ABLATION_MODE": True,
}
# Two threads take longer for so small a model, and much longer if other processes use the cores.
SINGLE: dict[str, SymbolValue | None] = {
    "RA_MLA_ABLATION_MODE": None,
    "SINGLE_TRAINING": True,
    "CPU_THREADS": 1,
}
# Of the study that many tests read; its runs have every file that a run may have.
TRAINED = "0,1,full"
KEPT: dict[str, SymbolValue] = {
    "OPTIMIZER_ADAMWSPAM": True,
    "TELEMETRY_INTERVAL": 10,
    "CHECKPOINT_INTERVAL": 2,
    "CHECKPOINT_KEEP_FINISHED": True,
}

# Trains the single training of a configuration, or a step, without a worker.
IN_PROCESS = ("gpt2/train_ra_mla.py", "--in-process")
STEP = "--ra-mla-ablation-step"


@dataclass
class Folder:
    """A build folder with a configuration and prepared data."""

    path: Path
    server: CommandServer
    scratch: Path

    def command(self, script: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run a script of the tree; return exit code, stdout and stderr."""
        done = self.start(script, *arguments, **variables)
        return done.wait(), done.stdout, done.stderr

    def start(
        self, script: str, *arguments: str, python: Path | None = None, **variables: str
    ) -> Command:
        """Start a script of the tree in a session of its own."""
        command = [*words_of(script), "-O", str(self.path), *arguments]
        environment = {**_outside(), **variables}
        return self.server.start(command, environment, self.scratch, python=python)

    def runs(self, steps: str) -> list[Path]:
        """Return the run directories of the selected steps."""
        plan = make_plan(config_layers(self.path), self.path, steps=steps)
        return [run.path for run in plan.runs]


def wait_for(
    condition: Callable[[], object], process: Command | None = None, seconds: float = 120
) -> None:
    """Wait until a condition holds, and no longer than the process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        said = process.stderr if process else ""
        assert time.monotonic() < deadline and (not process or process.poll() is None), said
        time.sleep(0.01)


def _outside() -> dict[str, str]:
    """Return the environment without variables of make; COUNT and SEED are for the tests."""
    ours = ("V", "JSON", "STEPS", "COUNT", "SEED")
    return {name: value for name, value in os.environ.items() if name not in ours}


def set_up(folder: Path, **settings: SymbolValue | None) -> None:
    """Write a few texts and the configuration SMALL with these changes, and prepare the data."""
    write_texts(folder)
    given = {name: value for name, value in {**SMALL, **settings}.items() if value is not None}
    write_build(folder, given)
    prepare_dataset(make_plan(config_layers(folder), folder).base.data, folder)


@pytest.fixture
def build(tmp_path, tmp_path_factory, server) -> Callable[..., Folder]:
    def make(**settings: SymbolValue | None) -> Folder:
        set_up(tmp_path, **settings)
        return Folder(tmp_path, server, tmp_path_factory.mktemp("streams"))

    return make


@pytest.fixture(scope="session")
def committed(shared_folder) -> Path:
    """Return a repository with the current files of this tree, to be cloned."""
    return shared_folder("committed", commit_copy)


@pytest.fixture
def shared(
    shared_folder, tmp_path, tmp_path_factory, server
) -> Callable[[str, Callable[[Folder], None]], Folder]:
    """Return a function that fills a folder once for all tests, and returns a copy of it."""
    scratch = tmp_path_factory.mktemp("streams")

    def copy(name: str, fill: Callable[[Folder], None]) -> Folder:
        made = shared_folder(name, lambda path: fill(Folder(path, server, scratch)))
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return Folder(tmp_path, server, scratch)

    return copy


@pytest.fixture
def trained(shared) -> Folder:
    """Return a folder in which the steps of TRAINED have one finished run each."""

    def train(folder: Folder) -> None:
        set_up(folder.path, **KEPT)
        code, _, said = folder.command("all", STEPS=TRAINED)
        assert code == 0, said

    return shared("trained", train)
