"""Training process of one variant of ``make bench-settings``.

    python -m gpt2.bench.settings_worker STEPS BUILD_DIR < VALUES.json

Times STEPS training steps, after a few warm-up steps, and prints the figures as JSON.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gpt2 import train
from gpt2.bench.settings import SettingFigures
from gpt2.check.short_run import LossRecorder
from gpt2.config import Config
from gpt2.running.preflight import TrainingPlace, check_machine
from gpt2.training.records import RecordWriter
from gpt2.training.session import TrainingSession
from gpt2.training.setup import open_session
from lib import console
from lib.env.gpu import peak_memory_bytes
from lib.runs.checkpoint import weights_digest
from lib.runs.run_dir import RunDir

# In the first steps the allocator still grows, and kernels are compiled and selected.
_WARMUP_STEPS = 3


def measure(config: Config, build_dir: Path, steps: int) -> SettingFigures:
    """Train a new model for the warm-up steps plus ``steps`` timed steps.

    Raises PreflightError if the machine cannot train the configuration.
    """
    # A measurement is not a run, so uncommitted code is allowed.
    check_machine([config], TrainingPlace(build_dir, build_dir, dirty=True))
    with tempfile.TemporaryDirectory() as folder:
        records = RecordWriter(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.model.train()
        log, batches = LossRecorder(session), session.batches()
        for done in range(_WARMUP_STEPS + steps):
            if done == _WARMUP_STEPS:
                started = _now(session)
            train.train_step(session, next(batches), log)
        seconds = _now(session) - started
        records.close()
    tokens = steps * config.train.tokens_per_iteration(config.model.shape.block_size)
    weights = weights_digest(session.weights())
    return SettingFigures(
        tokens / seconds, peak_memory_bytes(session.device), log.losses[-1], weights
    )


def _now(session: TrainingSession) -> float:
    """Return the time in seconds after pending GPU work has finished."""
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter()


def main() -> int:
    """Read the configuration from stdin, train, and print the figures."""
    steps, build_dir = sys.argv[1:]
    figures = measure(Config.from_values(json.load(sys.stdin)), Path(build_dir), int(steps))
    sys.stdout.write(json.dumps(asdict(figures)) + "\n")
    return 0


if __name__ == "__main__":
    console.run_main(main)
