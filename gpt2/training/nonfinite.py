"""Non-finite losses and gradients: detection, diagnosis per rank, and the records to replay the step.

Shape suffixes: R ranks, N micro-batches, B micro-batch, T tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gpt2.training.state import StepMetrics, StepSnapshot, TrainingSession, TrainState, on_device
from lib.env.machine import autocast
from lib.errors import Problem, RunError
from lib.files import sha256_file, write_atomic, write_json
from lib.report.render import text_lines

SCHEMA_VERSION = 1
COLUMNS = ("param", "shape", "dtype", "device", "nonfinite", "nan", "inf")
# Maximum rows of a table on a terminal; the record contains every row.
MAX_ROWS_SHOWN = 12
# Part of the message of torch's anomaly mode.
_ANOMALY_MESSAGE = "returned nan values"
# A tensor of the record.
Row = dict[str, Any]


class NumericsError(RunError, FloatingPointError):
    """A value is non-finite; ``record`` contains the diagnostics as plain JSON."""

    def __init__(self, problem: Problem, record: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.record = record
        # The batch and the generators of all ranks, stored in a file next to the record.
        self.tensors: dict[str, Tensor] = {}
        # Weights, optimizer and generators were restored, on every rank, to the start of the step.
        self.undone = False
        # The error was raised on this rank only.
        self.alone = False


def require_finite(
    state: TrainState, measured: StepMetrics, iteration: int, begun: StepSnapshot | None = None
) -> None:
    """Raise NumericsError if the loss or gradients of ``iteration`` are non-finite.

    With ``begun``, the check precedes the update: every rank must call it, all ranks raise if one
    has to, and the step is repeated without communication to find the rank and micro-batch.
    Without ``begun``, the check is on the metrics when the row is written; loss and norms are then
    equal on all ranks. An fp16 gradient overflow is not an error: the scaler skips the step.
    """
    loss, norm = torch.stack((measured.loss, measured.gradient_norm)).tolist()
    what = ""
    if not math.isfinite(loss):
        what = f"loss is {'NaN' if math.isnan(loss) else 'infinite'}"
    elif not math.isfinite(norm) and not state.scaler.is_enabled():
        what = f"gradient norm is {'NaN' if math.isnan(norm) else 'infinite'}"
    details = {"loss": json_number(loss), "gradient_norm": json_number(norm)}
    if begun is not None and state.group.any(bool(what)):
        raise _before_update(state, measured, iteration, begun, what, details)
    if begun is None and what:
        # The gradients no longer exist.
        rows = _bad_norms(state, measured, None) if math.isfinite(loss) else []
        raise _error(state, what, iteration, "after the update", rows, details)


def nonfinite_evaluation_error(state: TrainState, loss: float) -> NumericsError:
    """Return the error of a non-finite validation loss."""
    rows = find_nonfinite(state.group.whole_state(state.weights()), "weight")
    what = f"validation loss is {loss}"
    return _error(state, what, state.iteration, "in an evaluation", rows, {})


@contextmanager
def anomaly_detection(state: TrainState) -> Iterator[None]:
    """Raise NumericsError with the operation that returned a NaN, if DETECT_ANOMALY is set."""
    try:
        with torch.autograd.set_detect_anomaly(state.config.numerics.detect_anomaly):
            yield
    except RuntimeError as error:
        if _ANOMALY_MESSAGE not in str(error):
            raise
        alone, rank = state.group.size > 1, state.group.rank
        what = f"anomaly: {str(error).splitlines()[0].rstrip('.')}" + f" (rank {rank})" * alone
        details = {"rank": rank} if alone else {}
        found = _error(state, what, state.iteration + 1, "in the backward pass", [], details)
        found.alone = alone
        raise found from error


def _before_update(
    state: TrainState,
    measured: StepMetrics,
    iteration: int,
    begun: StepSnapshot,
    what: str,
    details: dict[str, Any],
) -> NumericsError:
    """Roll back the step and build an error with the diagnostics of every rank."""
    finite, is_distributed = math.isfinite(measured.loss.item()), state.group.size > 1
    # Gradients of a non-finite loss carry no information.
    tensors = _gradients(state.model) if finite else state.weights()
    reduced = find_nonfinite(state.group.whole_state(tensors), "gradient" if finite else "weight")
    report = {"rank": state.group.rank, "what": what, **_replay(state, begun)}
    begun.undo(state)
    ranks = [json.loads(text) for text in state.group.gather_text(json.dumps(report))]
    # The replay's rows are from before the all-reduce, and before pruning masks turn inf to NaN.
    rows = [
        row | {"rank": r["rank"]} if is_distributed else row for r in ranks for row in r["tensors"]
    ]
    rows = rows or reduced or (_bad_norms(state, measured, 0) if finite else [])
    bad_ranks = [f"rank {r['rank']}" for r in ranks if r["micro_batch"] is not None]
    what = next(r["what"] for r in ranks if r["what"])
    what += f" ({', '.join(bad_ranks)})" if is_distributed and bad_ranks else ""
    modules = [r["first_module"] for r in ranks if r["first_module"]]
    details = {**details, "lr": begun.lr, "ranks": ranks}
    error = _error(state, what, iteration, "before the update", rows, details, *modules)
    error.undone = True
    # Token ids [R, N, B, T] and generator states at the start of the step [R, bytes].
    batch = {
        "x": torch.stack([x_BT for x_BT, _ in begun.micro_batches]),
        "y": torch.stack([y_BT for _, y_BT in begun.micro_batches]),
        **{f"rng.{name}": saved for name, saved in begun.rng.items()},
    }
    error.tensors = {name: state.group.gather(tensor) for name, tensor in batch.items()}
    return error


def _replay(state: TrainState, begun: StepSnapshot) -> dict[str, Any]:
    """Repeat the step on this rank without communication, up to the first bad micro-batch."""
    report: dict[str, Any] = {"losses": [], "micro_batch": None, "first_module": "", "tensors": []}
    begun.undo(state)
    # Without communication, also if the parameters are sharded.
    model = state.whole_model()
    for i, (x_BT, y_BT) in enumerate(on_device(state.device, begun.micro_batches)):
        model.zero_grad(set_to_none=True)
        with autocast(state.config.machine), bad_modules(model) as modules:
            loss = model(x_BT, y_BT)
        finite, rows = math.isfinite(loss.item()), []
        report["losses"].append(json_number(loss.item()))
        if not finite:
            rows = find_nonfinite(dict(model.named_parameters()), "weight")
        elif not state.scaler.is_enabled():
            loss.backward()
            rows = find_nonfinite(_gradients(model), "gradient")
        if rows or not finite:
            report |= {"micro_batch": i, "first_module": "".join(modules[:1]), "tensors": rows}
            break
    return report


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def find_nonfinite(tensors: Mapping[str, Tensor | None], holds: str) -> list[Row]:
    """Return a row for each named tensor with non-finite elements; ``holds`` weight or gradient."""
    rows = []
    for name, tensor in tensors.items():
        if tensor is None or bool((finite := torch.isfinite(tensor.detach())).all()):
            continue
        nan, count = int(tensor.isnan().sum()), int((~finite).sum())
        # Row-major.
        first = int((~finite).flatten().int().argmax())
        rows.append(_row(name, tensor, holds, count, nan, count - nan, first))
    return rows


def _bad_norms(state: TrainState, measured: StepMetrics, count: int | None) -> list[Row]:
    """Return a row for each non-finite norm; ``count`` bad elements: 0 if the norm overflows fp32."""
    norms = measured.gradient_norms.tolist()
    return [
        _row(name, p, "gradient", count, count, count, None)
        for (name, p), norm in zip(state.model.named_parameters(), norms, strict=True)
        if not math.isfinite(norm)
    ]


def _row(name: str, tensor: Tensor, holds: str, *counts: int | None) -> Row:
    return {
        "param": name,
        "holds": holds,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        **dict(zip(("nonfinite", "nan", "inf", "first_bad_index"), counts, strict=True)),
    }


@contextmanager
def bad_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of modules with non-finite output, the innermost of the first one first."""
    names: list[str] = []
    by_module = {module: name or "the model" for name, module in model.named_modules()}

    def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
        # A loss of another package may call modules of its own.
        if names or module not in by_module:
            return
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
        # Masked attention scores are -infinity by design.
        if any(bool((t.isnan() | t.isposinf()).any()) for t in tensors):
            names.append(by_module[module])

    hook = register_module_forward_hook(check)
    try:
        yield names
    finally:
        hook.remove()


def _error(
    state: TrainState,
    what: str,
    iteration: int,
    phase: str,
    rows: list[Row],
    details: dict[str, Any],
    *modules: str,
) -> NumericsError:
    """Return the error, with the most likely origin of the values in its message."""
    train = state.config.train
    record = {
        "what": what,
        "iteration": iteration,
        "found": phase,
        "tensors": rows,
        # Seed and number determine each sequence.
        "sequences": {"first": (iteration - 1) * train.global_batch, "count": train.global_batch},
        "seed": state.config.seed,
        "micro_batch": train.batch_size,
        "accumulation": train.grad_accumulation,
        **details,
    }
    cause = f"found {phase}"
    if rows and rows[0]["nonfinite"] == 0:
        cause = f"all gradients are finite, but the norm of {rows[0]['param']} overflows"
    elif rows:
        kind = "gradient of " * (rows[0]["holds"] == "gradient")
        cause = f"first bad tensor {kind}{rows[0]['param']}"
    elif modules:
        cause = f"all weights are finite, first bad output from {modules[0]}"
    problem = Problem(f"{what} at it {iteration}, {cause}", code="numerics.non-finite")
    return NumericsError(problem, record)


def json_number(value: float) -> float | str:
    """Return ``value``, or "NaN", "infinity" or "-infinity", for which JSON has no number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


def format_table(rows: Sequence[Row]) -> list[str]:
    """Format rows as aligned lines with full names, of several ranks with the rank."""
    columns = (*["rank"] * any("rank" in row for row in rows), *COLUMNS)
    cells = [[str(row[column]) for column in columns] for row in rows]
    lines = text_lines([columns, *cells[:MAX_ROWS_SHOWN]])
    hidden = len(cells) - MAX_ROWS_SHOWN
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def write_numerics_failure(session: TrainingSession, error: NumericsError) -> list[str]:
    """Write numerics_failure.json and the offending batch. Return the log lines."""
    run, replay, batch = session.run, f"make RUNS={session.run.path.name}", None
    if error.tensors:
        contiguous = {name: t.contiguous() for name, t in error.tensors.items()}
        write_atomic(run.numerics_batch, safetensors.torch.save(contiguous))
        batch = {"file": run.numerics_batch.name, "sha256": sha256_file(run.numerics_batch)}
    else:
        # Leftover of an earlier failure.
        run.numerics_batch.unlink(missing_ok=True)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **error.record,
        "checkpoint": session.saved_at if error.undone else None,
        "batch": batch,
        "replay": replay,
    }
    write_json(run.numerics_failure, record)
    lines = format_table(error.record["tensors"]) if error.record["tensors"] else []
    effect = "repeats the step" if error.undone else "resumes from the newest checkpoint"
    return [*lines, f"{run.numerics_failure}: {replay} {effect}"]


def archive_resolved_failure(session: TrainingSession) -> None:
    """Keep the failure record of an earlier start: a deterministic step should have failed again."""
    run = session.run
    paths = [path for path in (run.numerics_failure, run.numerics_batch) if path.exists()]
    if paths:
        run.overcome.mkdir(exist_ok=True)
        for path in paths:
            path.replace(run.overcome / path.name)
        text = "an earlier start failed with non-finite values, but this start did not"
        session.records.line("WARN", f"{text}: {run.overcome}")
