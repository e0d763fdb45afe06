"""Training one run: the same loop for every configuration.

``run`` is what a worker process calls. It leaves a directory that describes itself, and may be
killed at any moment: the next call goes on from the newest good checkpoint to the same bytes.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gpt2.config import Config
from gpt2.evaluate import Evaluation
from gpt2.notes import notes
from gpt2.runs import read_resolved_config
from gpt2.training.belongs import made_for
from gpt2.training.describe import closing_facts, manifest_facts, rng_of_ranks, start_line
from gpt2.training.failure import set_apart, write_failure
from gpt2.training.finite import bad_evaluation
from gpt2.training.finish import write_results
from gpt2.training.log import Log
from gpt2.training.observe import require_observed
from gpt2.training.oom import DoesNotFit, fall_back
from gpt2.training.passes import MicroBatch, divided
from gpt2.training.records import NoRecords, Records, Report
from gpt2.training.session import Session
from gpt2.training.start import open_session, resume, warm_up
from gpt2.training.statistics import fallbacks, statistics_due, tell_statistics
from gpt2.training.step import optimizer_step
from gpt2.training.stopping import Stop
from gpt2.training.tracking import start_companions
from lib import checkpoint
from lib.errors import EXIT_DONE, Problem, RunError
from lib.machine.group import Group, lost_peer
from lib.machine.process import current_process
from lib.machine.warned import noting_warned
from lib.numerics.guard import NumericsError
from lib.optim.schedule import learning_rate_at
from lib.repro.manifest import begin_manifest, note_fallback
from lib.repro.seal import end_run
from lib.rundir import RunDir
from lib.status import State, Status, write_status

Batches = Iterator[list[MicroBatch]]

_UNSURE = "no deterministic form, its bits may differ from run to run: "


def run(
    run_dir: Path,
    build_dir: Path,
    report: Report,
    stop: Callable[[], bool],
    *,
    allow_stale: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Status:
    """Train the run of ``run_dir/resolved_config.yaml`` to its end, or until ``stop()``.

    The processes of one run all call it; rank 0 alone reports, asks ``stop`` and writes.
    ``report`` gets ``{"kind": "line", tag, text}`` and ``{"kind": "progress", iteration, iterations,
    loss, lr, grad_norm, tokens_per_second, eta_seconds}``. The status that is returned also stands
    in status.json. Errors before the first step are raised as KablateError; later ones make the
    run FAILED. ``allow_stale`` resumes a checkpoint that other code made. ``clock`` gives seconds.
    """
    started = time.monotonic()
    files = RunDir(run_dir)
    try:
        # Left last: no other rank waits for rank 0's trackers.
        with ExitStack() as opened, Group.join(current_process()) as group:
            # Rank 0 came here after the file was written, and the others after rank 0.
            config = read_resolved_config(files)
            wished = _or_asked_by_file(stop, files)
            stopping = Stop(wished, config.run_time_limit_seconds, group.agree)
            records = Records(files, report) if group.is_main else NoRecords(files)
            opened.callback(records.close)
            # The session gets no name here: it has to be gone when the group is left.
            return _to_the_end(
                _ready(config, build_dir, records, clock, group, allow_stale, opened),
                stopping,
                started,
            )
    # Comes this far before the first step, or where even the failure could not be written down.
    except OSError as error:
        raise RunError(Problem(f"cannot read or write: {error}", str(run_dir))) from error
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        raise RunError(Problem("another process of this run is gone", str(run_dir))) from error


def _or_asked_by_file(stop: Callable[[], bool], files: RunDir) -> Callable[[], bool]:
    """``stop``, or a file called stop in the run's directory; one of an earlier start is removed."""
    files.stop_request.unlink(missing_ok=True)
    return lambda: stop() or files.stop_request.exists()


def train(session: Session, stop: Stop) -> None:
    """Step until the budget is used or ``stop()``; evaluate and save on the way."""
    config, log, batches = session.config.train, Log(session), session.batches()
    try:
        while not stop():
            if statistics_due(session):
                tell_statistics(session)
            if _due(session, config.eval_interval, session.evaluated_at):
                _note_evaluation(session, session.evaluate(session.model, stop))
            if _due(session, config.checkpoint_interval, session.saved_at):
                save(session)
            if session.progress >= 1.0:
                return
            with session.watch:
                batches = _step_that_fits(session, batches, log)
                if statistics_due(session) or _at(
                    session, config.eval_interval, config.checkpoint_interval
                ):
                    log.flush()
    finally:
        with session.watch:
            log.flush()


def step(session: Session, micro_batches: list[MicroBatch], log: Log) -> None:
    """One optimizer step, and all that moves with it: iteration, progress, pruning, log."""
    lr = learning_rate_at(
        session.config.schedule,
        session.iteration,
        session.progress,
        session.budget.warmup_progress,
    )
    measured = optimizer_step(session, micro_batches, lr)
    if session.budget.is_time and session.device.type == "cuda":
        # Progress is measured in seconds, so the GPU's work has to be done when they are read.
        torch.cuda.synchronize(session.device)
    session.order.consumed()
    session.iteration += 1
    seconds = session.watch.seconds
    if session.budget.is_time:
        # Each process has a clock of its own.
        seconds = session.group.agree(seconds)
    session.progress = session.budget.progress(session.iteration, seconds)
    session.pruner.after_step(session.iteration, session.progress, session.optimizer)
    log.add(measured, lr)


def _step_that_fits(session: Session, batches: Batches, log: Log) -> Batches:
    """One step, after as many fallbacks as it takes; the batches to go on with.

    A checkpoint follows a fallback, so that a resumed run takes it at the same step.
    """
    fallbacks, micro_batches = len(session.oom_fallbacks), _fetch(session, batches)
    while True:
        try:
            step(session, micro_batches, log)
            break
        except DoesNotFit as error:
            cause = str(error)
        record = fall_back(session, cause)
        if session.group.is_main:
            note_fallback(session.run, record)
        micro_batches = divided(micro_batches, session.config.train.batch_size)
    if len(session.oom_fallbacks) == fallbacks:
        return batches
    log.flush()
    save(session)
    return session.batches()


def save(session: Session) -> None:
    """Write a checkpoint; metrics.jsonl is on the disk as far as the checkpoint counts it."""
    state = {
        "session": session.state_dict(),
        "metrics_bytes": session.records.position(),
        "origin": session.origin,
        "made_for": made_for(session),
    }
    if session.group.is_main:
        keep = session.config.train.checkpoint_keep
        checkpoint.save(session.run.checkpoints, session.iteration, session.weights(), state, keep)
    session.saved_at = session.iteration
    _write_status(session, State.RUNNING)


def _fetch(session: Session, batches: Batches) -> list[MicroBatch]:
    """The next global batch's share, and how long it was waited for."""
    started = time.perf_counter()
    found = next(batches)
    session.heartbeat.fetched(time.perf_counter() - started)
    return found


def _ready(
    config: Config,
    build_dir: Path,
    records: Records,
    clock: Callable[[], float],
    group: Group,
    allow_stale: bool,
    opened: ExitStack,
) -> Session:
    """A session that is about to take its first step, or its next one; ``opened`` ends its
    trackers."""
    noting = noting_warned(config.machine, lambda name: records.line("WARN", _UNSURE + name))
    warned = opened.enter_context(noting)
    session = open_session(config, build_dir, records, clock, group)
    session.warned = warned
    rng_at_start = rng_of_ranks(session)
    warm_up(session)
    resume(session, allow_stale)
    require_observed(session)
    _begin(session, build_dir, rng_at_start)
    session.companions = opened.enter_context(start_companions(session))
    return session


def _begin(session: Session, build_dir: Path, rng_at_start: dict[str, list[str]]) -> None:
    """Record what is about to run, before it does."""
    pids = session.group.gather(torch.tensor(os.getpid())).tolist()
    if session.group.is_main:
        session.run.checkpoints.mkdir(exist_ok=True)
        begin_manifest(
            session.run,
            build_dir,
            session.device,
            pids,
            manifest_facts(session, rng_at_start),
        )
    _write_status(session, State.RUNNING)
    session.heartbeat.beat("start", session.iteration, fallbacks=fallbacks(session))
    session.records.line("TRAIN", start_line(session))
    for note in notes(session.config):
        session.records.line(note.tag, note.text)


def _to_the_end(session: Session, stop: Stop, started: float) -> Status:
    """Train, evaluate and write the results; SUCCESS is written last."""
    try:
        train(session, stop)
        if session.saved_at != session.iteration:
            save(session)
        evaluation = None if stop.exit_code else session.evaluate(session.model, stop)
        if evaluation is None:
            return _interrupted(session, stop)
        _note_evaluation(session, evaluation)
        facts = closing_facts(session)
        if session.group.is_main:
            set_apart(session)
            write_results(session, evaluation, started)
    except NumericsError as error:
        return _not_finite(session, error)
    except RunError as error:
        return _failed(session, error.problems[0].what)
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0]
        return _failed(session, f"{message} Halve BATCH_SIZE and double GRAD_ACCUMULATION.")
    except OSError as error:
        return _failed(session, f"cannot write: {error}")
    return _succeeded(session, evaluation, facts)


def _succeeded(session: Session, evaluation: Evaluation, facts: dict[str, Any]) -> Status:
    seconds = session.watch.seconds
    # First: the manifest has a digest of the log.
    session.records.line(
        "DONE",
        f"val loss {evaluation.loss:.4f}   {session.iteration:,} it, {session.tokens:,} tokens in "
        f"{seconds:.1f} s   mean step {1000 * seconds / session.iteration:.1f} ms",
    )
    status = _write_status(session, State.SUCCESS, facts=facts)
    if session.group.is_main:
        # The final weights are there, so nothing will be resumed.
        checkpoint.delete_all(session.run.checkpoints)
    return status


def _interrupted(session: Session, stop: Stop) -> Status:
    message = f"{stop.reason}; saved at iteration {session.iteration}"
    session.records.log("STOP", message)
    return _write_status(session, State.INTERRUPTED, stop.exit_code, message)


def _not_finite(session: Session, error: NumericsError) -> Status:
    """Leave what it takes to make the step again; every rank comes here, or one alone."""
    if error.undone:
        try:
            save(session)
        except RunError as lost:
            session.records.line("WARN", f"the step cannot be made again: {lost}")
    if session.group.is_main or error.alone:
        for line in write_failure(session, error):
            session.records.line("FAIL", line)
    if error.undone:
        # Rank 0 is still writing, and would be ended soon after the others have.
        session.group.barrier()
    return _failed(session, error.problems[0].what)


def _failed(session: Session, message: str) -> Status:
    if not session.group.is_main:
        # Rank 0 may know nothing of it: whoever started the processes has to be told.
        raise RunError(message)
    session.records.log("FAIL", message)
    return _write_status(session, State.FAILED, RunError.exit_code, message)


def _write_status(
    session: Session,
    state: State,
    exit_code: int = EXIT_DONE,
    message: str = "",
    facts: dict[str, Any] | None = None,
) -> Status:
    status = Status(state, exit_code, message, session.iteration, session.budget.iterations)
    if session.group.is_main and state is State.RUNNING:
        write_status(session.run, status)
    elif session.group.is_main:
        end_run(session.run, status, facts)
    return status


def _note_evaluation(session: Session, evaluation: Evaluation | None) -> None:
    """Append an evaluation's row; one that was interrupted leaves none, and is made another time.

    NumericsError when its loss is not finite.
    """
    if evaluation is None:
        return
    if not math.isfinite(evaluation.loss):
        raise bad_evaluation(session, evaluation.loss)
    session.evaluated_at = session.iteration
    session.heartbeat.beat("eval", session.iteration, val_loss=evaluation.loss)
    session.records.metrics(
        kind="eval",
        iteration=session.iteration,
        tokens=session.tokens,
        val_loss=evaluation.loss,
        token_accuracy=evaluation.accuracy,
        sparsity=session.pruner.sparsity(),
    )
    session.records.log("EVAL", f"it {session.iteration}   val loss {evaluation.loss:.4f}")


def _due(session: Session, interval: int, last: int) -> bool:
    """Whether something is to be done at this iteration and has not been; the end is not one."""
    return session.iteration != last and session.progress < 1.0 and _at(session, interval)


def _at(session: Session, *intervals: int) -> bool:
    """Whether this iteration ends one of the intervals; 0 never ends."""
    return any(interval and session.iteration % interval == 0 for interval in intervals)
