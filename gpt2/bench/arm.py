"""One arm of ``make bench-knobs``, in the process that trains it.

    python -m gpt2.bench.arm STEPS BUILD_DIR < VALUES.json

prints the figures of so many of the trainer's steps, after a few that are not timed, as JSON.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gpt2 import train
from gpt2.bench.knobs import Figures
from gpt2.check.rehearsal import Losses
from gpt2.config import Config
from gpt2.preflight import TrainingPlace, check_machine
from gpt2.training.records import Records
from gpt2.training.session import Session
from gpt2.training.start import open_session
from lib import cli
from lib.machine.memory import peak_bytes
from lib.repro.weights import weights_digest
from lib.rundir import RunDir

# The allocator still grows in the first steps, and kernels are compiled and chosen.
_NOT_TIMED = 3


def measure(config: Config, build_dir: Path, steps: int) -> Figures:
    """Train a new model for ``steps`` steps and a few before them. PreflightError where it cannot."""
    # A measurement is no run: what it was made of need not be committed.
    check_machine([config], TrainingPlace(build_dir, build_dir, dirty=True))
    with tempfile.TemporaryDirectory() as folder:
        records = Records(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.model.train()
        log, batches = Losses(session), session.batches()
        for done in range(_NOT_TIMED + steps):
            if done == _NOT_TIMED:
                started = _now(session)
            train.step(session, next(batches), log)
        seconds = _now(session) - started
        records.close()
    tokens = steps * config.train.tokens_per_iteration(config.model.shape.block_size)
    weights = weights_digest(session.weights())
    return Figures(tokens / seconds, peak_bytes(session.device), log.losses[-1], weights)


def _now(session: Session) -> float:
    """Seconds, once the GPU has done what it was given."""
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter()


def main() -> int:
    """The command line."""
    steps, build_dir = sys.argv[1:]
    figures = measure(Config.from_values(json.load(sys.stdin)), Path(build_dir), int(steps))
    sys.stdout.write(json.dumps(asdict(figures)) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
