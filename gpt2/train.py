"""Training of one run: the same loop for every configuration.

Worker processes call ``run``. The run directory is self-describing, and a run may be killed at any
moment: the next call resumes from the newest intact checkpoint with byte-identical results.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gpt2.config import Config
from gpt2.evaluate import EvaluationResult
from gpt2.records.files import read_planned_config
from gpt2.study.notes import notes
from gpt2.training.finish import start_sidecars, write_results
from gpt2.training.metrics import MetricsLog, record_statistics, statistics_due
from gpt2.training.nonfinite import (
    NumericsError,
    archive_resolved_failure,
    nonfinite_evaluation_error,
    write_numerics_failure,
)
from gpt2.training.records import EventCallback, NullRecords, RecordWriter, StopCondition
from gpt2.training.run_description import (
    final_manifest_entries,
    initial_manifest_entries,
    require_resolved_settings,
    rng_digests_per_rank,
    startup_summary,
)
from gpt2.training.session import MicroBatch, TrainingSession, split_micro_batches
from gpt2.training.setup import open_session, resume, run_fingerprint, warm_up
from gpt2.training.step import (
    StepOutOfMemory,
    apply_next_fallback,
    cpu_memory_errors,
    optimizer_step,
)
from lib.env.observe import record_nondeterminism
from lib.env.process_group import ProcessGroup, is_lost_peer_error
from lib.env.ranks import current_process
from lib.errors import EXIT_DONE, Problem, RunError
from lib.optim.schedule import learning_rate_at
from lib.runs import checkpoint
from lib.runs.lease import no_guard
from lib.runs.manifest import begin_manifest, finalize_run, record_fallback
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

Batches = Iterator[list[MicroBatch]]

_NONDETERMINISTIC = "no deterministic implementation, results may differ between runs: "


def train_run(
    run_dir: Path,
    build_dir: Path,
    report: EventCallback,
    stop: Callable[[], bool],
    guard: Callable[[], None] = no_guard,
    *,
    allow_stale: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    order: Mapping[str, float] | None = None,
) -> RunStatus:
    """Train the run in ``run_dir`` to its end, or until ``stop()``.

    All processes of a run call it; only rank 0 reports, polls ``stop`` and writes. ``guard`` is
    called before every write, and raises LeaseLost if the run was taken over. ``report``
    receives ``{"kind": "line", tag, text}`` and ``{"kind": "progress", iteration, iterations, loss,
    lr, grad_norm, tokens_per_second, eta_seconds}``. ``allow_stale`` resumes a checkpoint that was
    made by other code. ``clock`` returns seconds. ``order`` is recorded: when the run was submitted.
    Returns the status, which is also in status.json.

    Errors before the first step are raised as KablateError; later errors set the status FAILED.
    """
    started = time.monotonic()
    files = RunDir(run_dir)
    try:
        # ``opened`` is closed last, so that no other rank waits for rank 0's trackers.
        with ExitStack() as opened, ProcessGroup.join(current_process()) as group:
            # The file exists: it is written before rank 0 joins, and the others join after rank 0.
            config = read_planned_config(files)
            stopping = StopCondition(
                lambda: stop() or files.stop_request.exists(),
                config.run_time_limit_seconds,
                group.agree,
            )
            main = group.is_main
            records = RecordWriter(files, report, guard) if main else NullRecords(files, guard)
            opened.callback(records.close)
            # No local variable: the session must be freed before the group is left.
            return _train_to_end(
                _prepare_session(
                    config, build_dir, records, clock, group, allow_stale, order or {}, opened
                ),
                stopping,
                started,
            )
    # Raised before the first step, or if the failure itself could not be recorded.
    except OSError as error:
        what = f"cannot read or write: {error}"
        advice = "free some space or fix the permissions; to resume, type: make"
        raise RunError(Problem(what, str(run_dir), advice, code="run.io-error")) from error
    except RuntimeError as error:
        if not is_lost_peer_error(error):
            raise
        what = "another process of this run exited"
        raise RunError(Problem(what, str(run_dir), code="run.lost-process")) from error


def train(session: TrainingSession, stop: StopCondition) -> None:
    """Train until the budget is used or ``stop()``, with periodic evaluations and checkpoints.

    After an interrupted evaluation there is no further step, so that the evaluation is due again.
    """
    config, log, batches = session.config.train, MetricsLog(session), session.batches()
    try:
        while not stop():
            if statistics_due(session):
                record_statistics(session)
            if _due(session, config.eval_interval, session.state.evaluated_at):
                evaluation = session.evaluate(session.state.whole_model(), stop)
                if evaluation is None:
                    return
                _record_evaluation(session, evaluation)
            if _due(session, config.checkpoint_interval, session.state.saved_at):
                save_checkpoint(session)
            if session.state.progress >= 1.0:
                return
            with session.state.clock:
                batches = _step_that_fits(session, batches, log)
                if statistics_due(session) or _ends_interval(
                    session, config.eval_interval, config.checkpoint_interval
                ):
                    log.flush()
    finally:
        with session.state.clock:
            log.flush()


def train_step(session: TrainingSession, micro_batches: list[MicroBatch], log: MetricsLog) -> None:
    """Run one optimizer step and update iteration, progress, pruning and log."""
    lr = learning_rate_at(
        session.config.schedule,
        session.state.iteration,
        session.state.progress,
        session.state.budget.warmup_progress,
    )
    measured = optimizer_step(session, micro_batches, lr)
    if session.state.budget.is_time and session.device.type == "cuda":
        # Progress is measured in seconds, so the GPU must be finished when they are read.
        torch.cuda.synchronize(session.device)
    session.state.order.consumed()
    session.state.iteration += 1
    seconds = session.state.clock.seconds
    if session.state.budget.is_time:
        # Clocks differ between processes; all use rank 0's value.
        seconds = session.group.agree(seconds)
    session.state.progress = session.state.budget.progress(session.state.iteration, seconds)
    session.state.pruner.after_step(
        session.state.iteration, session.state.progress, session.state.optimizer
    )
    log.add(measured, lr)


def _step_that_fits(session: TrainingSession, batches: Batches, log: MetricsLog) -> Batches:
    """Run one step with as many out-of-memory fallbacks as needed; return the batches to use next.

    A checkpoint follows a fallback, so that a resumed run applies it at the same step.
    """
    n_fallbacks, micro_batches = len(session.state.oom_fallbacks), _fetch(session, batches)
    while True:
        try:
            train_step(session, micro_batches, log)
            break
        except StepOutOfMemory as error:
            cause = error.problems[0].what
        record = apply_next_fallback(session, cause)
        if session.group.is_main:
            session.records.guard()
            record_fallback(session.run, record)
        micro_batches = split_micro_batches(micro_batches, session.config.train.batch_size)
    if len(session.state.oom_fallbacks) == n_fallbacks:
        return batches
    log.flush()
    save_checkpoint(session)
    return session.batches()


def save_checkpoint(session: TrainingSession) -> None:
    """Write a checkpoint, after syncing metrics.jsonl to the disk. Must be called on every rank."""
    weights, training = session.group.whole_state(
        (session.state.weights(), session.state.state_dict())
    )
    state = {
        "session": training,
        "records": session.records.position(),
        "origin": session.origin,
        "made_for": run_fingerprint(session),
    }
    if session.group.is_main:
        keep = session.config.train.checkpoint_keep
        checkpoint.save_checkpoint(
            session.run.checkpoints,
            session.state.iteration,
            weights,
            state,
            keep,
            session.records.guard,
        )
    session.state.saved_at = session.state.iteration
    _write_status(session, State.RUNNING)


def _fetch(session: TrainingSession, batches: Batches) -> list[MicroBatch]:
    """Return the next step's micro-batches, and record the wait in the heartbeat."""
    started = time.perf_counter()
    micro_batches = next(batches)
    session.heartbeat.fetched(time.perf_counter() - started)
    return micro_batches


def _prepare_session(
    config: Config,
    build_dir: Path,
    records: RecordWriter,
    clock: Callable[[], float],
    group: ProcessGroup,
    allow_stale: bool,
    order: Mapping[str, float],
    opened: ExitStack,
) -> TrainingSession:
    """Return a session that is ready for its first or next step; ``opened`` stops its sidecars."""
    noting = record_nondeterminism(
        config.machine, lambda name: records.line("WARN", _NONDETERMINISTIC + name)
    )
    warned = opened.enter_context(noting)
    session = open_session(config, build_dir, records, clock, group)
    session.state.nondeterministic_ops = warned
    rng_at_start = rng_digests_per_rank(session)
    warm_up(session)
    resume(session, allow_stale)
    require_resolved_settings(session)
    _begin(session, rng_at_start, order)
    session.sidecars = opened.enter_context(start_sidecars(session))
    return session


def _begin(
    session: TrainingSession,
    rng_at_start: dict[str, list[str]],
    order: Mapping[str, float],
) -> None:
    """Write manifest, status, heartbeat and log lines before the first step."""
    pids = session.group.gather(torch.tensor(os.getpid())).tolist()
    if session.group.is_main:
        session.records.guard()
        session.run.checkpoints.mkdir(exist_ok=True)
        begin_manifest(
            session.run,
            session.device,
            pids,
            initial_manifest_entries(session, rng_at_start),
            order,
        )
    _write_status(session, State.RUNNING)
    fallbacks = len(session.state.oom_fallbacks)
    session.heartbeat.beat("start", session.state.iteration, fallbacks=fallbacks)
    session.records.line("TRAIN", startup_summary(session))
    for note in notes(session.config):
        session.records.line(note.tag, note.text)


def _train_to_end(session: TrainingSession, stop: StopCondition, started: float) -> RunStatus:
    """Train, evaluate and write the results; the status SUCCESS is written last."""
    try:
        with cpu_memory_errors():
            train(session, stop)
            if session.state.saved_at != session.state.iteration:
                save_checkpoint(session)
            if stop.exit_code:
                return _interrupted(session, stop)
            evaluation = session.evaluate(session.state.whole_model(), stop)
            if evaluation is None:
                return _interrupted(session, stop)
            facts = final_manifest_entries(session)
            record_results(session, evaluation, started)
    except NumericsError as error:
        return _failed_nonfinite(session, error)
    except RunError as error:
        return _failed(session, error.problems[0])
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0].rstrip(".")
        what = f"{message}. Halve BATCH_SIZE and double GRAD_ACCUMULATION."
        return _failed(session, Problem(what, code="run.out-of-memory"))
    except OSError as error:
        return _failed(session, Problem(f"cannot write: {error}", code="run.io-error"))
    return _succeeded(session, evaluation, facts)


def record_results(session: TrainingSession, evaluation: EvaluationResult, started: float) -> None:
    """Write the final evaluation to all records; ``started`` is by time.monotonic.

    Raises NumericsError if the loss is non-finite.
    """
    _record_evaluation(session, evaluation)
    if session.group.is_main:
        session.records.guard()
        archive_resolved_failure(session)
    write_results(session, evaluation, started)


def _succeeded(
    session: TrainingSession, evaluation: EvaluationResult, facts: dict[str, Any]
) -> RunStatus:
    seconds = session.state.clock.seconds
    # Logged first, because the manifest contains a digest of the log.
    session.records.line(
        "DONE",
        f"val loss {evaluation.loss:.4f}   {session.state.iteration:,} it, {session.state.tokens:,} tokens in "
        f"{seconds:.1f} s   mean step {1000 * seconds / session.state.iteration:.1f} ms",
    )
    status = _write_status(session, State.SUCCESS, facts=facts)
    if session.group.is_main and not session.config.train.checkpoint_keep_finished:
        # The final weights are written, so the run will not be resumed.
        shutil.rmtree(session.run.checkpoints, ignore_errors=True)
    return status


def _interrupted(session: TrainingSession, stop: StopCondition) -> RunStatus:
    message = f"{stop.reason}; saved at iteration {session.state.iteration}"
    session.records.log("STOP", message)
    return _write_status(session, State.INTERRUPTED, stop.exit_code, message)


def _failed_nonfinite(session: TrainingSession, error: NumericsError) -> RunStatus:
    """Write the records needed to replay the step. Called on every rank, or on a single one."""
    if error.undone:
        try:
            save_checkpoint(session)
        except RunError as save_error:
            session.records.line("WARN", f"the step cannot be replayed: {save_error}")
    if session.group.is_main or error.alone:
        session.records.guard()
        for line in write_numerics_failure(session, error):
            session.records.line("FAIL", line)
    if error.undone:
        # Rank 0 is still writing, and would be killed soon after another rank exits.
        session.group.barrier()
    return _failed(session, error.problems[0])


def _failed(session: TrainingSession, problem: Problem) -> RunStatus:
    if not session.group.is_main:
        # Rank 0 may not be aware of the failure, so it is reported through this process.
        raise RunError(Problem(problem.what, code=problem.code))
    session.records.log("FAIL", problem.what)
    return _write_status(session, State.FAILED, RunError.exit_code, problem.what)


def _write_status(
    session: TrainingSession,
    state: State,
    exit_code: int = EXIT_DONE,
    message: str = "",
    facts: dict[str, Any] | None = None,
) -> RunStatus:
    status = RunStatus(
        state, exit_code, message, session.state.iteration, session.state.budget.iterations
    )
    guard = session.records.guard
    if session.group.is_main and state is State.RUNNING:
        guard()
        write_status(session.run, status)
    elif session.group.is_main:
        finalize_run(session.run, status, facts, guard)
    return status


def _record_evaluation(session: TrainingSession, evaluation: EvaluationResult) -> None:
    """Append the metrics row of an evaluation. Raises NumericsError if the loss is non-finite."""
    if not math.isfinite(evaluation.loss):
        raise nonfinite_evaluation_error(session, evaluation.loss)
    session.state.evaluated_at = session.state.iteration
    session.heartbeat.beat("eval", session.state.iteration, val_loss=evaluation.loss)
    session.records.metrics(
        kind="eval",
        iteration=session.state.iteration,
        tokens=session.state.tokens,
        val_loss=evaluation.loss,
        token_accuracy=evaluation.accuracy,
        sparsity=session.state.pruner.sparsity(),
    )
    session.records.log("EVAL", f"it {session.state.iteration}   val loss {evaluation.loss:.4f}")


def _due(session: TrainingSession, interval: int, last: int) -> bool:
    """Return whether a periodic task is due and not done yet; never true at the end of training."""
    return (
        session.state.iteration != last
        and session.state.progress < 1.0
        and _ends_interval(session, interval)
    )


def _ends_interval(session: TrainingSession, *intervals: int) -> bool:
    """Return whether this iteration ends one of the intervals; an interval of 0 never ends."""
    return any(interval and session.state.iteration % interval == 0 for interval in intervals)
