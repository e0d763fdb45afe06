"""Training of one run: the same loop for every configuration.

Worker processes call ``run``. The run directory is self-describing, and a run may be killed at any
moment: the next call resumes from the newest intact checkpoint with byte-identical results.
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

_NONDETERMINISTIC = "no deterministic implementation, results may differ between runs: "


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

    All processes of a run call it; only rank 0 reports, polls ``stop`` and writes. ``report``
    receives ``{"kind": "line", tag, text}`` and ``{"kind": "progress", iteration, iterations, loss,
    lr, grad_norm, tokens_per_second, eta_seconds}``. ``allow_stale`` resumes a checkpoint that was
    made by other code. ``clock`` returns seconds. Returns the status, which is also in status.json.

    Errors before the first step are raised as KablateError; later errors set the status FAILED.
    """
    started = time.monotonic()
    files = RunDir(run_dir)
    try:
        # ``opened`` is closed last, so that no other rank waits for rank 0's trackers.
        with ExitStack() as opened, Group.join(current_process()) as group:
            # The file exists: it is written before rank 0 joins, and the others join after rank 0.
            config = read_resolved_config(files)
            stop_requested = _or_stop_file(stop, files)
            stopping = Stop(stop_requested, config.run_time_limit_seconds, group.agree)
            records = Records(files, report) if group.is_main else NoRecords(files)
            opened.callback(records.close)
            # No local variable: the session must be freed before the group is left.
            return _train_to_end(
                _prepare_session(config, build_dir, records, clock, group, allow_stale, opened),
                stopping,
                started,
            )
    # Raised before the first step, or if the failure itself could not be recorded.
    except OSError as error:
        what = f"cannot read or write: {error}"
        raise RunError(Problem(what, str(run_dir), code="run.io-error")) from error
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        what = "another process of this run exited"
        raise RunError(Problem(what, str(run_dir), code="run.lost-process")) from error


def _or_stop_file(stop: Callable[[], bool], files: RunDir) -> Callable[[], bool]:
    """Combine ``stop`` with the stop file in the run directory; delete a leftover stop file."""
    files.stop_request.unlink(missing_ok=True)
    return lambda: stop() or files.stop_request.exists()


def train(session: Session, stop: Stop) -> None:
    """Train until the budget is used or ``stop()``, with periodic evaluations and checkpoints."""
    config, log, batches = session.config.train, Log(session), session.batches()
    try:
        while not stop():
            if statistics_due(session):
                tell_statistics(session)
            if _due(session, config.eval_interval, session.evaluated_at):
                _record_evaluation(session, session.evaluate(session.model, stop))
            if _due(session, config.checkpoint_interval, session.saved_at):
                save(session)
            if session.progress >= 1.0:
                return
            with session.watch:
                batches = _step_that_fits(session, batches, log)
                if statistics_due(session) or _ends_interval(
                    session, config.eval_interval, config.checkpoint_interval
                ):
                    log.flush()
    finally:
        with session.watch:
            log.flush()


def step(session: Session, micro_batches: list[MicroBatch], log: Log) -> None:
    """Run one optimizer step and update iteration, progress, pruning and log."""
    lr = learning_rate_at(
        session.config.schedule,
        session.iteration,
        session.progress,
        session.budget.warmup_progress,
    )
    measured = optimizer_step(session, micro_batches, lr)
    if session.budget.is_time and session.device.type == "cuda":
        # Progress is measured in seconds, so the GPU must be finished when they are read.
        torch.cuda.synchronize(session.device)
    session.order.consumed()
    session.iteration += 1
    seconds = session.watch.seconds
    if session.budget.is_time:
        # Clocks differ between processes; all use rank 0's value.
        seconds = session.group.agree(seconds)
    session.progress = session.budget.progress(session.iteration, seconds)
    session.pruner.after_step(session.iteration, session.progress, session.optimizer)
    log.add(measured, lr)


def _step_that_fits(session: Session, batches: Batches, log: Log) -> Batches:
    """Run one step with as many out-of-memory fallbacks as needed; return the batches to use next.

    A checkpoint follows a fallback, so that a resumed run applies it at the same step.
    """
    n_fallbacks, micro_batches = len(session.oom_fallbacks), _fetch(session, batches)
    while True:
        try:
            step(session, micro_batches, log)
            break
        except DoesNotFit as error:
            cause = error.problems[0].what
        record = fall_back(session, cause)
        if session.group.is_main:
            note_fallback(session.run, record)
        micro_batches = divided(micro_batches, session.config.train.batch_size)
    if len(session.oom_fallbacks) == n_fallbacks:
        return batches
    log.flush()
    save(session)
    return session.batches()


def save(session: Session) -> None:
    """Write a checkpoint, after syncing metrics.jsonl to the disk. Must be called on every rank."""
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
    """Return the next step's micro-batches, and record the wait in the heartbeat."""
    started = time.perf_counter()
    micro_batches = next(batches)
    session.heartbeat.fetched(time.perf_counter() - started)
    return micro_batches


def _prepare_session(
    config: Config,
    build_dir: Path,
    records: Records,
    clock: Callable[[], float],
    group: Group,
    allow_stale: bool,
    opened: ExitStack,
) -> Session:
    """Return a session that is ready for its first or next step; ``opened`` stops its sidecars."""
    noting = noting_warned(
        config.machine, lambda name: records.line("WARN", _NONDETERMINISTIC + name)
    )
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
    """Write manifest, status, heartbeat and log lines before the first step."""
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


def _train_to_end(session: Session, stop: Stop, started: float) -> Status:
    """Train, evaluate and write the results; the status SUCCESS is written last."""
    try:
        train(session, stop)
        if session.saved_at != session.iteration:
            save(session)
        evaluation = None if stop.exit_code else session.evaluate(session.model, stop)
        if evaluation is None:
            return _interrupted(session, stop)
        _record_evaluation(session, evaluation)
        facts = closing_facts(session)
        if session.group.is_main:
            set_apart(session)
            write_results(session, evaluation, started)
    except NumericsError as error:
        return _failed_nonfinite(session, error)
    except RunError as error:
        return _failed(session, error.problems[0])
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0]
        what = f"{message} Halve BATCH_SIZE and double GRAD_ACCUMULATION."
        return _failed(session, Problem(what, code="run.out-of-memory"))
    except OSError as error:
        return _failed(session, Problem(f"cannot write: {error}", code="run.io-error"))
    return _succeeded(session, evaluation, facts)


def _succeeded(session: Session, evaluation: Evaluation, facts: dict[str, Any]) -> Status:
    seconds = session.watch.seconds
    # Logged first, because the manifest contains a digest of the log.
    session.records.line(
        "DONE",
        f"val loss {evaluation.loss:.4f}   {session.iteration:,} it, {session.tokens:,} tokens in "
        f"{seconds:.1f} s   mean step {1000 * seconds / session.iteration:.1f} ms",
    )
    status = _write_status(session, State.SUCCESS, facts=facts)
    if session.group.is_main:
        # The final weights are written, so the run will not be resumed.
        checkpoint.delete_all(session.run.checkpoints)
    return status


def _interrupted(session: Session, stop: Stop) -> Status:
    message = f"{stop.reason}; saved at iteration {session.iteration}"
    session.records.log("STOP", message)
    return _write_status(session, State.INTERRUPTED, stop.exit_code, message)


def _failed_nonfinite(session: Session, error: NumericsError) -> Status:
    """Write the records needed to replay the step. Called on every rank, or on a single one."""
    if error.undone:
        try:
            save(session)
        except RunError as save_error:
            session.records.line("WARN", f"the step cannot be replayed: {save_error}")
    if session.group.is_main or error.alone:
        for line in write_failure(session, error):
            session.records.line("FAIL", line)
    if error.undone:
        # Rank 0 is still writing, and would be killed soon after another rank exits.
        session.group.barrier()
    return _failed(session, error.problems[0])


def _failed(session: Session, problem: Problem) -> Status:
    if not session.group.is_main:
        # Rank 0 may not be aware of the failure, so it is reported through this process.
        raise RunError(Problem(problem.what, code=problem.code))
    session.records.log("FAIL", problem.what)
    return _write_status(session, State.FAILED, RunError.exit_code, problem.what)


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


def _record_evaluation(session: Session, evaluation: Evaluation | None) -> None:
    """Append the metrics row of an evaluation; an interrupted one (None) is repeated later.

    Raises NumericsError if the loss is non-finite.
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
    """Return whether a periodic task is due and not done yet; never true at the end of training."""
    return (
        session.iteration != last and session.progress < 1.0 and _ends_interval(session, interval)
    )


def _ends_interval(session: Session, *intervals: int) -> bool:
    """Return whether this iteration ends one of the intervals; an interval of 0 never ends."""
    return any(interval and session.iteration % interval == 0 for interval in intervals)
