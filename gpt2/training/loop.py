"""Training of one run, from set-up to results, in the order in which it happens.

The same loop for every configuration. A run may be killed at any moment: the next call resumes from
the newest intact checkpoint with byte-identical results. Shape suffixes: B micro-batch, T tokens.
"""

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import Config
from gpt2.data import tokenizer
from gpt2.data.dataset import open_dataset
from gpt2.evaluate import EvaluationResult, Evaluator
from gpt2.lora import store_base
from gpt2.model import GPT
from gpt2.records.files import read_planned_config
from gpt2.study.notes import notes
from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.manifest import (
    final_manifest_entries,
    initial_manifest_entries,
    observed_settings,
    rng_digests_per_rank,
    startup_summary,
)
from gpt2.training.metrics import MetricsLog, record_statistics
from gpt2.training.nonfinite import (
    NumericsError,
    anomaly_detection,
    archive_resolved_failure,
    nonfinite_evaluation_error,
    require_finite,
    write_numerics_failure,
)
from gpt2.training.out_of_memory import (
    StepOutOfMemory,
    apply_next_fallback,
    cpu_memory_errors,
    probe_memory,
)
from gpt2.training.records import EventCallback, RecordWriter, StopCondition
from gpt2.training.results import write_results
from gpt2.training.resume import continue_optimizer, resume, run_fingerprint
from gpt2.training.rng import seed_all
from gpt2.training.sidecars import start_sidecars
from gpt2.training.state import (
    DataOrder,
    MicroBatch,
    StepMetrics,
    StepSnapshot,
    TrainingSession,
    TrainState,
    build_state,
    on_device,
)
from gpt2.weights.convert import load_initial_weights
from lib.env.hardware import device_name
from lib.env.machine import autocast, set_up
from lib.env.observe import (
    NondeterministicOperations,
    record_nondeterminism,
    require_no_deviations,
)
from lib.env.preflight import require_machine
from lib.env.process_group import ProcessGroup, is_lost_peer_error
from lib.env.ranks import current_process
from lib.env.sharded import is_sharded, local, sum_over_shards
from lib.errors import EXIT_DONE, Problem, RunError
from lib.optim.schedule import learning_rate_at
from lib.runs import checkpoint
from lib.runs.checkpoint import weights_digest
from lib.runs.code import loaded_source
from lib.runs.lease import no_guard
from lib.runs.manifest import begin_manifest, finalize_run, record_fallback
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

Batches = Iterator[list[MicroBatch]]


def train_run(
    run_dir: Path,
    build_dir: Path,
    report: EventCallback,
    stop: Callable[[], bool],
    guard: Callable[[], None] = no_guard,
    *,
    allow_stale: bool = False,
    order: Mapping[str, float] | None = None,
) -> RunStatus:
    """Train the run in ``run_dir`` to its end, or until ``stop()``.

    All processes of a run call it. Rank 0 polls ``stop``, which is true after SIGTERM or Ctrl-C, reports
    and writes; the others write their heartbeat only, and the record of a failure that is theirs alone.
    ``guard`` is called before every write, and raises LeaseLost if the run was taken over. ``report``
    receives the events of RecordWriter. ``allow_stale`` resumes a checkpoint that was made by other
    code. ``order`` is recorded: when the run was submitted.

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
            records = RecordWriter(files, report, guard, opened=group.is_main)
            opened.callback(records.close)
            deterministic = record_nondeterminism(config.machine, records.nondeterministic)
            warned = opened.enter_context(deterministic)
            # No local variable: the session must be freed before the group is left.
            return _train_to_end(
                _ready(
                    open_session(config, build_dir, records, group, warned),
                    allow_stale,
                    order or {},
                    opened,
                ),
                stopping,
                started,
            )
    # Raised before the first step, or if the failure itself could not be recorded.
    except OSError as error:
        text = f"cannot read or write: {error}"
        advice = "free some space or fix the permissions; to resume, type: make"
        raise RunError(Problem(text, str(run_dir), advice, code="run.io-error")) from error
    except RuntimeError as error:
        if not is_lost_peer_error(error):
            raise
        problem = Problem(
            "another process of this run exited", str(run_dir), code="run.lost-process"
        )
        raise RunError(problem) from error


def open_session(
    config: Config,
    build_dir: Path,
    records: RecordWriter,
    group: ProcessGroup | None = None,
    nondeterministic: NondeterministicOperations | None = None,
) -> TrainingSession:
    """Set up the machine, open the data, and build model, optimizer and pruner, equal on all ranks."""
    group = group or ProcessGroup()
    require_machine(config.machine, config.train.gpus)
    device = set_up(config.machine, group.process, config.train.gpus)
    dataset = open_dataset(config.data, build_dir)
    # The digest of the data set includes that of its vocabulary.
    _require_equal(group, "data and vocabulary", dataset.digest)
    model = GPT(config.model)
    model.init_weights(config.seed, config.init.init_stream)
    # Digests of the files that the initial weights were loaded from.
    initial = load_initial_weights(model, config, build_dir, records.line)
    store_base(model, config.model.adapters)
    weights = weights_digest(dict(model.named_parameters()))
    init_digests = _require_equal(group, "initial weights", weights)
    state = build_state(config, model, group, device)
    state.alive = records.alive
    if config.init.iteration is not None and not config.model.adapters:
        continue_optimizer(state, build_dir, records.line)
    # After initialization, because it has separate generators.
    seed_all(config.seed, group.rank)
    return TrainingSession(
        **vars(state),
        run=records.run,
        dataset=dataset,
        tokenizer=tokenizer.load_tokenizer(config.data.tokenizer, config.data.folder(build_dir)),
        evaluate=Evaluator(config, dataset.val, device, group, records.evaluated),
        records=records,
        budget=TrainingBudget(config),
        clock=TrainingClock(),
        order=DataOrder(group),
        # Facts outside the configuration that can affect the bits of the result. The version is a plain
        # string: a checkpoint may not contain torch's version class.
        origin={
            "sources": loaded_source() | initial,
            "torch": str(torch.__version__),
            "device": device_name(device),
        },
        init_digests=init_digests,
        nondeterministic_ops=nondeterministic,
    )


def _require_equal(group: ProcessGroup, what: str, digest: str) -> list[str]:
    """Return the digest of each rank. Raises RunError if they differ: no later step would notice."""
    digests = group.gather_text(digest)
    if ranks := [str(rank) for rank, other in enumerate(digests) if other != digests[0]]:
        unequal = f"{what} of rank {', '.join(ranks)} differ from rank 0"
        raise RunError(Problem(unequal, code="run.rank-mismatch"))
    return digests


def _ready(
    session: TrainingSession, allow_stale: bool, order: Mapping[str, float], opened: ExitStack
) -> TrainingSession:
    """Warm up, resume, and write manifest, status and log lines; ``opened`` stops the sidecars."""
    config, records = session.config, session.records
    rng_at_start = rng_digests_per_rank(session)
    warm_up(session)
    resume(session, allow_stale)
    if config.repro.strict:
        require_no_deviations(observed_settings(session))
    pids = session.group.gather(torch.tensor(os.getpid())).tolist()
    if session.group.is_main:
        records.guard()
        session.run.checkpoints.mkdir(exist_ok=True)
        entries = initial_manifest_entries(session, rng_at_start)
        begin_manifest(session.run, session.device, pids, entries, order)
    _write_status(session, State.RUNNING)
    session.beat("start", fallbacks=len(session.oom_fallbacks))
    records.line("TRAIN", startup_summary(session))
    for note in notes(session.config):
        records.line(note.tag, note.text)
    session.sidecars = opened.enter_context(start_sidecars(session))
    return session


def warm_up(session: TrainingSession) -> None:
    """Run and undo ``WARMUP_ITERATIONS`` steps: compilation and kernel selection are not timed."""
    if not session.config.machine.warmup_iterations:
        return
    weights = {name: tensor.clone() for name, tensor in session.weights().items()}
    state = copy.deepcopy(session.state_dict())
    micro_batches = next(session.batches())
    try:
        for _ in range(session.config.machine.warmup_iterations):
            optimizer_step(session, micro_batches, session.config.schedule.learning_rate)
    except StepOutOfMemory as error:
        what = f"out of memory in the warm-up; fallbacks follow: {error.problems[0].what}"
        session.records.line("OOM", what)
    session.load_weights(weights)
    session.load_state_dict(state)


def _train_to_end(session: TrainingSession, stop: StopCondition, started: float) -> RunStatus:
    """Train, evaluate and write the results; the status SUCCESS is written last."""
    try:
        with cpu_memory_errors():
            train(session, stop)
            if session.saved_at != session.iteration:
                save_checkpoint(session)
            evaluation = None
            if not stop.exit_code:
                evaluation = session.evaluate(session.whole_model(), stop)
            if evaluation is None:
                message = f"{stop.reason}; saved at iteration {session.iteration}"
                session.records.log("STOP", message)
                return _write_status(session, State.INTERRUPTED, stop.exit_code, message)
            facts = final_manifest_entries(session)
            record_results(session, evaluation, started)
    except (RunError, torch.OutOfMemoryError, OSError) as error:
        return _fail(session, error)
    # Of steps alone. The mean of the summary leaves out those before the first log line.
    seconds, iterations = session.clock.seconds, session.iteration
    # Logged first, because the manifest contains a digest of the log.
    session.records.line(
        "DONE",
        f"val loss {evaluation.loss:.4f}   {iterations:,} it, {session.tokens:,} tokens in "
        f"{seconds:.1f} s   mean step {1000 * seconds / iterations:.1f} ms",
    )
    status = _write_status(session, State.SUCCESS, facts=facts)
    if session.group.is_main and not session.config.train.checkpoint_keep_finished:
        # The final weights are written, so the run will not be resumed.
        shutil.rmtree(session.run.checkpoints, ignore_errors=True)
    return status


def _fail(session: TrainingSession, error: Exception) -> RunStatus:
    """Record an error after the first step: the status FAILED."""
    if isinstance(error, NumericsError):
        _record_nonfinite(session, error)
    if isinstance(error, RunError):
        problem = error.problems[0]
    elif isinstance(error, OSError):
        problem = Problem(f"cannot write: {error}", code="run.io-error")
    else:
        what = str(error).splitlines()[0].rstrip(".")
        advice = "Halve BATCH_SIZE and double GRAD_ACCUMULATION."
        problem = Problem(f"{what}. {advice}", code="run.out-of-memory")
    if not session.group.is_main:
        # Rank 0 may not be aware of the failure, so it is reported through this process.
        raise RunError(Problem(problem.what, code=problem.code)) from error
    session.records.log("FAIL", problem.what)
    return _write_status(session, State.FAILED, RunError.exit_code, problem.what)


def train(session: TrainingSession, stop: StopCondition) -> None:
    """Train until the budget is used or ``stop()``, with periodic evaluations and checkpoints.

    After an interrupted evaluation there is no further step, so that the evaluation is due again.
    """
    # The sequences of a step follow from seed and iteration: a resumed run continues the order.
    log, batches = MetricsLog(session), session.batches()
    try:
        while not stop():
            measures, evaluates, saves = _due(session)
            if measures:
                record_statistics(session)
            if evaluates:
                # The loss of each document; those of the last evaluation are written as results.
                evaluation = session.evaluate(session.whole_model(), stop)
                if evaluation is None:
                    return
                _record_evaluation(session, evaluation)
            if saves:
                save_checkpoint(session)
            if session.progress >= 1.0:
                return
            # Only steps are timed: the clock stands still outside of this block.
            with session.clock:
                batches = _step_that_fits(session, batches, log)
                if any(_due(session)):
                    log.flush()
    finally:
        with session.clock:
            log.flush()


def _due(session: TrainingSession) -> tuple[bool, bool, bool]:
    """Return whether statistics, an evaluation and a checkpoint are due, and not done yet.

    The first are due after as many steps as their interval. At the end of training only statistics
    are: an evaluation and a checkpoint follow it anyway. An interval of 0 never ends.
    """
    train, iteration, ended = session.config.train, session.iteration, session.progress >= 1.0
    # The iterations of the last ones are 0 in a new run, in which nothing is due at iteration 0.
    measures, evaluates, saves = (
        bool(interval) and iteration != last and (iteration % interval == 0 or ended)
        for interval, last in (
            (session.config.telemetry.statistics_interval, session.statistics_at),
            (train.eval_interval, session.evaluated_at),
            (train.checkpoint_interval, session.saved_at),
        )
    )
    return measures, evaluates and not ended, saves and not ended


def _step_that_fits(session: TrainingSession, batches: Batches, log: MetricsLog) -> Batches:
    """Run one step with as many out-of-memory fallbacks as needed; return the batches to use next."""
    waiting = time.perf_counter()
    micro_batches = next(batches)
    session.waits.append(time.perf_counter() - waiting)
    n_fallbacks = len(session.oom_fallbacks)
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
        size = session.config.train.batch_size
        # The same sequences in the same order: the size is a divisor of the one before.
        micro_batches = [
            pair
            for x_BT, y_BT in micro_batches
            for pair in zip(x_BT.split(size), y_BT.split(size), strict=True)
        ]
    if len(session.oom_fallbacks) == n_fallbacks:
        return batches
    # A resumed run applies the fallbacks at the same step.
    log.flush()
    save_checkpoint(session)
    return session.batches()


def train_step(session: TrainingSession, micro_batches: list[MicroBatch], log: MetricsLog) -> None:
    """Run one optimizer step and update iteration, progress, pruning and log."""
    budget = session.budget
    # The learning rate follows the steps in the warm-up, and the progress afterwards.
    lr = learning_rate_at(
        session.config.schedule, session.iteration, session.progress, budget.warmup_progress
    )
    measured = optimizer_step(session, micro_batches, lr)
    if budget.is_time and session.device.type == "cuda":
        # Progress is measured in seconds, so the GPU must be finished when they are read.
        torch.cuda.synchronize(session.device)
    session.order.consumed()
    session.iteration += 1
    seconds = session.clock.seconds
    if budget.is_time:
        # Clocks differ between processes; all use rank 0's value.
        seconds = session.group.agree(seconds)
    session.progress = budget.progress(session.iteration, seconds)
    session.pruner.after_step(session.iteration, session.progress, session.optimizer)
    log.add(measured, lr)


def optimizer_step(state: TrainState, micro_batches: list[MicroBatch], lr: float) -> StepMetrics:
    """Run one optimizer step and return its metrics, still on the device.

    Raises NumericsError if loss or gradients are non-finite: with CHECK_NUMERICS before the update,
    otherwise when the log reads them, because reading here would stall a GPU. Raises StepOutOfMemory
    if memory runs out and OOM_FALLBACK is on. Both errors leave weights and states unchanged.
    """
    begun = StepSnapshot.now(state, micro_batches, lr)
    parameters, clip = list(state.model.parameters()), state.config.train.grad_clip
    loss = _compute_gradients(state, begun)
    state.scaler.unscale_(state.optimizer)
    state.pruner.mask_gradients()
    norms = _gradient_norms(parameters)
    measured = StepMetrics(loss, norms, torch.linalg.vector_norm(norms))
    if state.config.numerics.due(state.iteration + 1):
        # Repeats a bad step on each rank, to find its micro-batch, module and tensors.
        require_finite(state, measured, state.iteration + 1, begun)
    state.pruner.observe(measured.gradient_norm)
    if clip > 0.0:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, measured.gradient_norm)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.scaler.step(state.optimizer, gradient_norm=measured.gradient_norm)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return measured


def step_on_tokens(state: TrainState, tokens: list[Tensor]) -> StepMetrics:
    """Run one optimizer step on given micro-batches [B, T + 1], without data, records and log."""
    micro_batches = [(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in tokens]
    return optimizer_step(state, micro_batches, state.config.schedule.learning_rate)


def _compute_gradients(state: TrainState, begun: StepSnapshot) -> Tensor:
    """Return the loss after the passes. Rolls back and raises StepOutOfMemory if it can fall back."""
    probe_memory(state, begun)
    try:
        with cpu_memory_errors(), anomaly_detection(state):
            return accumulate_gradients(state, begun.micro_batches)
    except torch.OutOfMemoryError as error:
        # Other ranks may be in the middle of a collective operation, which cannot be rolled back.
        if not state.config.train.oom_fallback or state.group.size > 1:
            raise
        cause = str(error).splitlines()[0]
    # Outside the except block, so that no traceback keeps the step's tensors alive.
    begun.undo(state)
    raise StepOutOfMemory(Problem(cause, code="run.out-of-memory"))


def accumulate_gradients(state: TrainState, micro_batches: list[MicroBatch]) -> Tensor:
    """Accumulate gradients of the mean loss over all micro-batches and ranks; return that loss."""
    share = 1.0 / len(micro_batches)
    total = torch.zeros((), device=state.device)
    # One autocast context for all micro-batches, so that weights are cast once per step.
    with autocast(state.config.machine):
        for i, (x_BT, y_BT) in enumerate(on_device(state.device, micro_batches), 1):
            total += state.backward(x_BT, y_BT, share, exchange=i == len(micro_batches))
            state.alive()
    return state.group.add(total) / state.group.size


def _gradient_norms(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of each parameter's gradient; zero if the loss does not depend on it."""
    rows = [local(p.detach() if p.grad is None else p.grad) for p in parameters]
    # A frozen parameter may be integers.
    zero = torch.zeros((), device=rows[0].device)
    gradients = [
        row if p.grad is not None else zero.to(row.dtype if row.is_floating_point() else zero.dtype)
        for p, row in zip(parameters, rows, strict=True)
    ]
    norms = torch.stack(torch._foreach_norm(gradients))
    if not is_sharded(parameters[0]):
        return norms
    # In double precision, in which a square does not overflow.
    return sum_over_shards(norms.double().square(), parameters[0]).sqrt().to(norms.dtype)


def _record_evaluation(session: TrainingSession, evaluation: EvaluationResult) -> None:
    """Append the metrics row of an evaluation. Raises NumericsError if the loss is non-finite."""
    if not math.isfinite(evaluation.loss):
        raise nonfinite_evaluation_error(session, evaluation.loss)
    session.evaluated_at = session.iteration
    session.beat("eval", val_loss=evaluation.loss)
    session.records.metrics(
        kind="eval",
        iteration=session.iteration,
        tokens=session.tokens,
        val_loss=evaluation.loss,
        token_accuracy=evaluation.accuracy,
        sparsity=session.pruner.sparsity(),
    )
    session.records.log("EVAL", f"it {session.iteration}   val loss {evaluation.loss:.4f}")


def save_checkpoint(session: TrainingSession) -> None:
    """Write a checkpoint, after syncing metrics.jsonl to the disk. Must be called on every rank."""
    weights, training = session.group.whole_state((session.weights(), session.state_dict()))
    state = {
        "session": training,
        "records": session.records.position(),
        "origin": session.origin,
        "made_for": run_fingerprint(session),
    }
    if session.group.is_main:
        folder, keep = session.run.checkpoints, session.config.train.checkpoint_keep
        checkpoint.save_checkpoint(
            folder, session.iteration, weights, state, keep, session.records.guard
        )
    session.saved_at = session.iteration
    _write_status(session, State.RUNNING)


def record_results(session: TrainingSession, evaluation: EvaluationResult, started: float) -> None:
    """Write the final evaluation to all records; ``started`` is by time.monotonic."""
    _record_evaluation(session, evaluation)
    if session.group.is_main:
        session.records.guard()
        archive_resolved_failure(session)
    write_results(session, evaluation, started)


def _record_nonfinite(session: TrainingSession, error: NumericsError) -> None:
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


def _write_status(
    session: TrainingSession,
    state: State,
    exit_code: int = EXIT_DONE,
    message: str = "",
    facts: dict[str, Any] | None = None,
) -> RunStatus:
    status = RunStatus(state, exit_code, message, session.iteration, session.budget.iterations)
    if session.group.is_main and state is State.RUNNING:
        session.records.guard()
        write_status(session.run, status)
    elif session.group.is_main:
        finalize_run(session.run, status, facts, session.records.guard)
    return status
