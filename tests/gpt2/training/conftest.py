"""Tiny training runs with dropout, pruning, SPAM and all intervals active."""

import json
import multiprocessing
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.records.files import write_resolved_config
from gpt2.study.resolve import resolve_config
from gpt2.training.loop import open_session, train_run, train_step
from gpt2.training.records import RecordWriter
from gpt2.training.state import TrainingSession
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.ranks import rank_environment
from lib.runs.code import head_commit
from lib.runs.run_dir import RunDir, RunStatus, State, read_status
from tests.json_rows import read_rows

ITERATIONS = 12
# Number of processes → four sequences in all, one in each forward pass.
SPLITS: dict[int, dict[str, SymbolValue | None]] = {
    size: {"GPUS": size, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 4 // size} for size in (1, 2, 4)
}
BASE: dict[str, SymbolValue] = {
    "CPU_THREADS": 1,
    "SINGLE_TRAINING": True,
    "DEVICE_CPU": True,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 16,
    "BLOCK_SIZE": 16,
    "DROPOUT": "0.2",
    "TOKENIZER_BYTE": True,
    "DATASET_CUSTOM": True,
    "CUSTOM_PATH": "texts",
    "VAL_FRACTION": "0.3",
    "EVAL_TOKENS": 144,
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "MAX_ITERS": ITERATIONS,
    "OPTIMIZER_ADAMWSPAM": True,
    "LEARNING_RATE": "1e-2",
    "MIN_LEARNING_RATE": "1e-3",
    "WARMUP_STEPS": 2,
    "PRUNING_MAGNITUDE": True,
    "PRUNING_FREQUENCY": 1,
    "LOG_INTERVAL": 3,
    "EVAL_INTERVAL": 5,
    "CHECKPOINT_INTERVAL": 4,
    "SAMPLE_TOKENS": 8,
    "TELEMETRY_INTERVAL": 0,
}
# Training steps only.
BARE_ITERATIONS = 6
BARE: dict[str, SymbolValue | None] = {
    "DROPOUT": "0.0",
    "EVAL_INTERVAL": 0,
    "CHECKPOINT_INTERVAL": 0,
    "SAMPLE_TOKENS": 0,
    "MAX_ITERS": BARE_ITERATIONS,
}
NSA: dict[str, SymbolValue] = {
    "ATTENTION_PROJECTION_GROUPED": True,
    "N_KV_HEAD": 1,
    "ATTENTION_PATTERN_NSA": True,
    "NSA_COMPRESS_BLOCK": 4,
    "NSA_COMPRESS_STRIDE": 2,
    "NSA_SELECT_BLOCK": 4,
    "NSA_SELECT_COUNT": 3,
    "NSA_WINDOW": 4,
    "DROPOUT": "0.0",
}
# Native sparse attention that skips some tokens.
SPARSE = NSA | {
    "NSA_SELECT_BLOCK": 6,
    "NSA_SELECT_COUNT": 4,
    "NSA_WINDOW": 5,
    "BLOCK_SIZE": 48,
}


@dataclass
class Trained:
    """Run directory, final status and reported events of a run."""

    files: RunDir
    status: RunStatus
    events: list[dict[str, Any]]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of ``kind`` in metrics.jsonl."""
        return [row for row in read_rows(self.files.metrics) if row["kind"] == kind]

    def summary(self) -> Any:
        return json.loads(self.files.summary.read_text())

    def manifest(self) -> Any:
        return json.loads(self.files.manifest.read_text())

    def lines(self) -> str:
        """Return the displayed lines."""
        return "\n".join(f"{e['tag']} {e['text']}" for e in self.events if e["kind"] == "line")

    def core(self) -> dict[str, Any]:
        """Return all results that must be byte-identical."""
        whole = (self.files.metrics, self.files.per_query, self.files.weights, self.files.sample)
        summary = self.summary()
        summary.pop("timing")
        return {path.name: path.read_bytes() for path in whole} | {"summary": summary}


@pytest.fixture(scope="session")
def tree() -> KconfigTree:
    return KconfigTree()


@pytest.fixture(scope="session")
def build_dir(tree, tmp_path_factory) -> Path:
    """A build folder whose data set is prepared."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "texts").mkdir()
    for i in range(16):
        text = " ".join(f"{i * j % 17} apples and {j} pears." for j in range(2 + i))
        (folder / "texts" / f"{i:02d}.txt").write_text(text)
    prepare_dataset(resolve_config(tree, [ConfigLayer.of("test", "test", BASE)]).data, folder)
    return folder


@pytest.fixture(scope="session")
def configure(tree):
    """Build a configuration from the base with changed symbols; None removes a symbol."""

    def build(**changes):
        symbols = {name: v for name, v in (BASE | changes).items() if v is not None}
        return resolve_config(tree, [ConfigLayer.of("test", "test", symbols)])

    return build


@dataclass
class Trainer:
    """Trainer of configurations in directories below ``folder``."""

    build_dir: Path
    folder: Path

    def __call__(
        self,
        config: Config,
        name: str = "run",
        stop_at: int | None = None,
        stop: Callable[[], bool] | None = None,
        **arguments: Any,
    ) -> Trained:
        """Start or resume the run ``name``, until ``stop()`` or after ``stop_at`` iterations."""
        files, events, done = self.prepare(config, name), list[Any](), [0]

        def counted(session: TrainingSession, *rest: Any) -> None:
            train_step(session, *rest)
            done[0] = session.iteration

        def reached() -> bool:
            return stop_at is not None and done[0] >= stop_at

        with mock.patch("gpt2.training.loop.train_step", counted):
            status = train_run(
                files.path, self.build_dir, events.append, stop or reached, **arguments
            )
        return Trained(files, status, events)

    def prepare(self, config: Config, name: str) -> RunDir:
        """Write the configuration of the run ``name``."""
        files = RunDir(self.folder / name)
        files.path.mkdir(exist_ok=True)
        write_resolved_config(files, config)
        return files

    def found(self, name: str) -> Trained:
        """Return the files that other processes wrote for the run ``name``."""
        files = RunDir(self.folder / name)
        return Trained(files, read_status(files) or RunStatus(State.RUNNING), [])


@pytest.fixture
def train(build_dir, tmp_path) -> Trainer:
    return Trainer(build_dir, tmp_path)


@pytest.fixture(scope="session")
def lasting(build_dir, tmp_path_factory):
    """Return a function that returns a trainer of runs that several tests only read."""

    def start() -> Trainer:
        torch.set_num_threads(1)
        return Trainer(build_dir, tmp_path_factory.mktemp("lasting"))

    return start


@pytest.fixture(scope="session")
def trained(configure, lasting) -> Trained:
    """An uninterrupted run of the base configuration."""
    return lasting()(configure())


@pytest.fixture(scope="session")
def uninterrupted(trained) -> dict[str, Any]:
    return trained.core()


@pytest.fixture(scope="session")
def interrupted(configure, lasting):
    """Return a function that trains the base configuration up to an iteration, once for all tests."""
    return cache(lambda iteration: lasting()(configure(), stop_at=iteration))


@pytest.fixture
def stopped_at(interrupted, train):
    """Return a function that copies the run interrupted at an iteration into the test's folder."""

    def copied(iteration):
        shutil.copytree(interrupted(iteration).files.path, train.folder / "run")
        return train.found("run")

    return copied


@pytest.fixture
def session(configure, build_dir, tmp_path):
    """Return a function that opens a session of the base configuration with changed symbols."""
    with ExitStack() as opened:

        def build(**changes):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            records = RecordWriter(RunDir(folder), lambda event: None)
            opened.callback(records.close)
            return open_session(configure(**changes), build_dir, records)

        yield build


@dataclass
class Ranks:
    """Forked processes that train together."""

    folder: Path
    meetings: int = 0

    def __call__(self, size: int, body: Callable[[int], Any]) -> list[Any]:
        """What ``body(rank)`` returns on each rank, as JSON gives it back; an error as its text.

        A rank that a signal ended gives the signal's negative number.
        """
        self.meetings += 1
        meeting = self.folder / f"meeting-{self.meetings}"
        told = [self.folder / f"{meeting.name}-rank-{rank}.json" for rank in range(size)]

        def run(rank: int) -> None:
            os.environ.update(rank_environment(rank, size, meeting))
            try:
                found = body(rank)
            # Any error is reported to the parent process.
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
            told[rank].write_text(json.dumps(found))
            os._exit(0)

        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=run, args=(rank,)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
        return [p.exitcode or json.loads(path.read_text()) for p, path in zip(processes, told)]


@pytest.fixture
def ranks(tmp_path) -> Ranks:
    return Ranks(tmp_path)


@pytest.fixture
def together(train, ranks):
    """Train one run in ``GPUS`` processes; return rank 0's files and each rank's result."""

    def start(config, name="run", **arguments):
        def body(rank: int) -> list[Any]:
            status = train(config, name, **arguments).status
            return [status.state, status.iteration, status.message]

        (train.folder / name).mkdir(exist_ok=True)
        size = config.train.gpus
        ended = ranks(size, body) if size > 1 else [body(0)]
        return train.found(name), ended

    return start


def moved(begun: Trained, name: str) -> str:
    """Copy what another run needs to continue from the checkpoints of a run; return its name."""
    elsewhere = RunDir(begun.files.path.with_name(name))
    shutil.copytree(begun.files.checkpoints, elsewhere.checkpoints)
    for file in (begun.files.metrics, begun.files.timing):
        shutil.copy(file, elsewhere.path)
    return name


@contextmanager
def at_call(target: str, calls: int, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` before the function ``target`` is called, after so many other calls."""
    original, number = pkgutil.resolve_name(target), count()

    def called(*arguments: Any, **named: Any) -> Any:
        if next(number) == calls:
            act()
        return original(*arguments, **named)

    with mock.patch(target, called):
        yield


def losses(trained: Trained, iterations: int) -> torch.Tensor:
    """Return loss and gradient norm of each of so many iterations."""
    rows = trained.rows("train")
    assert [row["iteration"] for row in rows] == list(range(1, iterations + 1))
    return torch.tensor([(r["loss"], r["grad_norm"]) for r in rows], dtype=torch.float64)


@pytest.fixture(scope="module", autouse=True)
def _quick_starts() -> Iterator[None]:
    """Ask git once for the commit and the changed files.

    For a module: until the end of the session, tests of other folders would have it too.
    """
    with mock.patch("lib.runs.code.head_commit", cache(head_commit)):
        yield


@pytest.fixture(autouse=True)
def _one_thread(torch_as_before) -> None:
    torch.set_num_threads(1)
