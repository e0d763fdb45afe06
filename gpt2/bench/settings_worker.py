"""Training process of one side of ``make bench-settings`` or ``make bench-overhead``.

    python -m gpt2.bench.settings_worker setting STEPS BUILD_DIR < VALUES.json
    python -m gpt2.bench.settings_worker recorded|bare BUILD_DIR STARTED < VALUES.json

Prints the figures as JSON. ``setting`` times STEPS training steps after a few warm-up steps.
``recorded`` is the complete trainer in a temporary run directory. ``bare`` trains the same model
with the same optimizer, pruner and batches, but records nothing: no metrics rows, no digests, no
finiteness checks, no files, no sidecar processes. STARTED is the start time of the process in
seconds of time.time().
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gpt2 import train
from gpt2.bench.settings import WARMUP_ITERATIONS, OverheadFigures, SettingFigures
from gpt2.check.short_run import LossRecorder
from gpt2.config import Config
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler
from gpt2.records.run_files import write_resolved_config
from gpt2.running.preflight import TrainingPlace, check_machine
from gpt2.training.records import NullRecords, RecordWriter
from gpt2.training.session import TrainingSession
from gpt2.training.setup import open_session
from lib import console
from lib.env.gpu import peak_memory_bytes
from lib.env.machine import autocast
from lib.errors import Problem, RunError
from lib.optim.schedule import learning_rate_at
from lib.runs.checkpoint import weights_digest
from lib.runs.record import read_manifest
from lib.runs.run_dir import RunDir, State


def time_setting(config: Config, build_dir: Path, steps: int) -> SettingFigures:
    """Train a new model for the warm-up steps plus ``steps`` timed steps.

    Raises PreflightError if the machine cannot train the configuration.
    """
    # A measurement is not a run, so uncommitted code is allowed.
    check_machine([config], TrainingPlace(build_dir, build_dir, dirty=True))
    with tempfile.TemporaryDirectory() as folder:
        records = RecordWriter(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.state.model.train()
        log, batches = LossRecorder(session), session.batches()
        for done in range(WARMUP_ITERATIONS + steps):
            if done == WARMUP_ITERATIONS:
                started = _now(session)
            train.train_step(session, next(batches), log)
        seconds = _now(session) - started
        records.close()
    tokens = steps * config.train.tokens_per_iteration(config.model.shape.block_size)
    weights = weights_digest(session.state.weights())
    return SettingFigures(
        tokens / seconds, peak_memory_bytes(session.device), log.losses[-1], weights
    )


def _now(session: TrainingSession) -> float:
    """Return the time in seconds after pending GPU work has finished."""
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter()


class IterationTimer:
    """Timer of whole iterations: stores the start of each iteration and the end of the last one."""

    def __init__(self, config: Config, started: float) -> None:
        self._iterations = config.train.max_iters
        self._on_gpu = config.machine.device == "cuda"
        self._started = started
        # Wall-clock and CPU seconds of this process.
        self._times: list[tuple[float, float]] = []

    def __call__(self) -> bool:
        """Record the time after pending GPU work has finished. Returns False (do not stop)."""
        # Later calls come from the evaluation after the last step, not from an iteration.
        if len(self._times) <= self._iterations:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._times.append((time.time(), time.process_time()))
        return False

    def figures(self, weights: str) -> OverheadFigures:
        """Return the figures from the first timed iteration to the end of the last iteration."""
        (start, cpu_start), (end, cpu_end) = (
            self._times[WARMUP_ITERATIONS],
            self._times[self._iterations],
        )
        start_up = self._times[0][0] - self._started
        return OverheadFigures(end - start, cpu_end - cpu_start, start_up, weights)


def time_recorded(
    config: Config, build_dir: Path, folder: Path, timer: IterationTimer
) -> OverheadFigures:
    """Time the complete trainer. Raises RunError if the run does not succeed."""
    files = RunDir(folder)
    write_resolved_config(files, config)
    status = train.train_run(folder, build_dir, lambda event: None, timer)
    if status.state is not State.SUCCESS:
        what = f"recorded side: run ended as {status.state}: {status.message}"
        raise RunError(Problem(what, code="run.failed"))
    return timer.figures(read_manifest(files).final_weights_digest)


def time_bare(
    config: Config, build_dir: Path, folder: Path, timer: IterationTimer
) -> OverheadFigures:
    """Time the bare loop, which trains the same weights."""
    session = open_session(config, build_dir, NullRecords(RunDir(folder)))
    session.state.model.train()
    batches = iter(_batches(session))
    for iteration in range(config.train.max_iters):
        timer()
        _bare_step(session, next(batches), iteration)
    timer()
    return timer.figures(weights_digest(session.state.weights()))


def _bare_step(
    session: TrainingSession, micro_batches: list[tuple[torch.Tensor, torch.Tensor]], iteration: int
) -> None:
    config, optimizer = session.config, session.state.optimizer
    parameters = list(session.state.model.parameters())
    with autocast(config.machine):
        for x_BT, y_BT in micro_batches:
            x_BT, y_BT = x_BT.to(session.device), y_BT.to(session.device)
            loss = session.forward(x_BT, y_BT) / len(micro_batches)
            with torch.autocast(session.device.type, enabled=False):
                session.state.scaler.scale(loss).backward()
    session.state.scaler.unscale_(optimizer)
    session.state.pruner.mask_gradients()
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.train.grad_clip or float("inf"))
    session.state.pruner.observe(norm)
    progress, warm_up = (
        session.state.budget.progress(iteration, 0.0),
        session.state.budget.warmup_progress,
    )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(config.schedule, iteration, progress, warm_up)
    session.state.scaler.step(optimizer, gradient_norm=norm)
    session.state.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    done = session.state.budget.progress(iteration + 1, 0.0)
    session.state.pruner.after_step(iteration + 1, done, optimizer)


def _batches(session: TrainingSession) -> BatchLoader:
    """Return the session's batches without the digest of the data order."""
    config, train = session.config, session.config.train
    length = config.model.shape.block_size
    sampler = TrainSampler(session.dataset.train, length, config.seed)
    on_gpu = session.device.type == "cuda"
    return BatchLoader(sampler, config.data, train.global_batch, train.batch_size, 0, 1, 0, on_gpu)


def main() -> int:
    """Read the configuration from stdin, train one side, and print the figures."""
    side, *args = sys.argv[1:]
    config = Config.from_values(json.load(sys.stdin))
    if side == "setting":
        steps, build_dir = args
        figures: SettingFigures | OverheadFigures = time_setting(
            config, Path(build_dir), int(steps)
        )
    else:
        build_dir, started = args
        figures = _time_overhead(side, config, Path(build_dir), float(started))
    sys.stdout.write(json.dumps(asdict(figures)) + "\n")
    return 0


def _time_overhead(side: str, config: Config, build_dir: Path, started: float) -> OverheadFigures:
    # A measurement is not a run, so uncommitted code is allowed.
    check_machine([config], TrainingPlace(build_dir, build_dir, dirty=True))
    loop = {"recorded": time_recorded, "bare": time_bare}[side]
    with tempfile.TemporaryDirectory(dir=build_dir, prefix="overhead-") as scratch:
        folder = Path(scratch) / "overhead" / f"run-s{config.seed}-{config.hash8}"
        folder.mkdir(parents=True)
        # Tracker files outside the run directory belong to this measurement too.
        os.environ["TRACKIO_DIR"] = scratch
        return loop(config, build_dir, folder, IterationTimer(config, started))


if __name__ == "__main__":
    console.run_main(main)
