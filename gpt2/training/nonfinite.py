"""Detection of non-finite values and of the tensors that contain them."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from gpt2.training.session import StepMetrics, StepSnapshot, TrainingSession, on_device
from lib.env.machine import autocast
from lib.errors import Problem, RunError
from lib.files import sha256_file, write_atomic, write_json
from lib.report.render import text_lines

# Detection of tensors with NaN or infinity, and of the first module that outputs them.


COLUMNS = ("param", "shape", "dtype", "device", "nonfinite", "nan", "inf")
# Maximum rows of a table on a terminal; the record contains every row.
MAX_ROWS_SHOWN = 12


class NumericsError(RunError, FloatingPointError):
    """A value is non-finite; ``record`` contains the diagnostics as plain JSON.

    ``tensors`` are stored in a file next to the record. ``undone`` means that weights, optimizer
    and random generators were restored, on every rank, to the start of the step. ``alone`` means
    that the error was raised on this rank only.
    """

    def __init__(
        self,
        problem: Problem,
        record: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        undone: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(problem)
        self.record = record
        self.tensors = dict(tensors or {})
        self.undone = undone
        self.alone = alone


@dataclass(frozen=True)
class NonFiniteTensor:
    """A weight or gradient with non-finite elements."""

    param: str
    # weight or gradient.
    holds: str
    shape: list[int]
    dtype: str
    device: str
    nonfinite: int
    nan: int
    inf: int
    # Row-major index of the first non-finite element.
    first_bad_index: int

    @property
    def name(self) -> str:
        """Return the name of the tensor for messages."""
        return self.param if self.holds == "weight" else f"gradient of {self.param}"


def find_nonfinite(
    tensors: Iterable[tuple[str, Tensor | None]], holds: str
) -> list[NonFiniteTensor]:
    """Return a row for each named tensor with non-finite elements, in input order."""
    rows = ((name, t, ~torch.isfinite(t.detach())) for name, t in tensors if t is not None)
    return [_row(name, t.detach(), bad, holds) for name, t, bad in rows if bool(bad.any())]


def format_table(rows: Iterable[Mapping[str, Any]], first: tuple[str, ...] = ()) -> list[str]:
    """Format rows as aligned lines: columns ``first``, then ``COLUMNS``; full names."""
    columns = (*first, *COLUMNS)
    cells = [[str(row[column]) for column in columns] for row in rows]
    lines = text_lines([columns, *cells[:MAX_ROWS_SHOWN]])
    hidden = len(cells) - MAX_ROWS_SHOWN
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def to_json_rows(tensors: Iterable[NonFiniteTensor]) -> list[dict[str, Any]]:
    """Return the tensors as plain JSON."""
    return [asdict(row) for row in tensors]


def json_number(value: float) -> float | str:
    """Return ``value``, or "NaN", "infinity" or "-infinity", for which JSON has no number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


@dataclass
class FirstNonFiniteModule:
    """Recorder of the first (innermost) module with non-finite output."""

    name: str = ""
    _handles: list[Any] = field(default_factory=list, repr=False)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Check the output of every module of ``model`` in forward passes inside the context."""
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            tensors = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
            # Masked attention scores are -infinity by design.
            if not self.name and any(bool((t.isnan() | t.isposinf()).any()) for t in tensors):
                self.name = name or "the model"

        return check


def _row(name: str, tensor: Tensor, bad: Tensor, holds: str) -> NonFiniteTensor:
    nan = int(torch.isnan(tensor).sum())
    count = int(bad.sum())
    return NonFiniteTensor(
        param=name,
        holds=holds,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        nonfinite=count,
        nan=nan,
        inf=count - nan,
        first_bad_index=int(bad.flatten().int().argmax()),
    )


# Non-finite losses and gradients: detection, diagnosis per rank, and an error on all ranks.
#
# Shape suffixes: R ranks, N micro-batches, B micro-batch, T tokens.


_ADVICE = "try a lower LEARNING_RATE, a longer WARMUP_STEPS or GRAD_CLIP=1.0"
# Part of the message of torch's anomaly mode.
_ANOMALY_MESSAGE = "returned nan values"


def require_finite(
    session: TrainingSession,
    measured: StepMetrics,
    iteration: int,
    begun: StepSnapshot | None = None,
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
        what = f"loss is {_format_value(loss)}"
    elif not math.isfinite(norm) and not session.state.scaler.is_enabled():
        what = f"gradient norm is {_format_value(norm)}"
    if begun is not None and session.group.any(bool(what)):
        raise _before_update(session, measured, iteration, begun, what)
    if begun is None and what:
        raise _after_update(session, measured, iteration, what)


def nonfinite_evaluation_error(session: TrainingSession, loss: float) -> NumericsError:
    """Return the error of a non-finite validation loss."""
    what = f"validation loss is {loss}"
    weights = session.group.whole_state(session.state.weights())
    rows = to_json_rows(find_nonfinite(weights.items(), "weight"))
    return _error(session, what, session.state.iteration, "in an evaluation", rows, {})


@contextmanager
def anomaly_detection(session: TrainingSession) -> Iterator[None]:
    """Enable torch's anomaly detection if DETECT_ANOMALY is set.

    Raises NumericsError with the operation that returned a NaN in the backward pass. The warning
    that torch logs has the stack trace of the forward pass.
    """
    if not session.config.numerics.detect_anomaly:
        yield
        return
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    except RuntimeError as error:
        if _ANOMALY_MESSAGE not in str(error):
            raise
        is_distributed = session.group.size > 1
        what = f"anomaly: {str(error).splitlines()[0].rstrip('.')}"
        what += f" (rank {session.group.rank})" if is_distributed else ""
        rank = {"rank": session.group.rank} if is_distributed else {}
        numerics_error = _error(
            session, what, session.state.iteration + 1, "in the backward pass", [], rank
        )
        numerics_error.alone = is_distributed
        raise numerics_error from error


def _before_update(
    session: TrainingSession, measured: StepMetrics, iteration: int, begun: StepSnapshot, what: str
) -> NumericsError:
    """Roll back the step and build an error with the diagnostics of every rank."""
    finite = math.isfinite(measured.loss.item())
    tensors: dict[str, Tensor | None]
    if finite:
        tensors = {name: p.grad for name, p in session.state.model.named_parameters()}
    else:
        # Gradients of a non-finite loss carry no information.
        tensors = dict(session.state.weights())
    holds = "gradient" if finite else "weight"
    reduced_rows = to_json_rows(find_nonfinite(session.group.whole_state(tensors).items(), holds))
    report = {"rank": session.group.rank, "what": what, **_replay(session, begun)}
    # States of the generators at the start of the step.
    report["rng"] = {
        name: hashlib.sha256(state.numpy().tobytes()).hexdigest()
        for name, state in begun.rng.items()
    }
    begun.undo(session)
    ranks = [json.loads(text) for text in session.group.gather_text(json.dumps(report))]
    is_distributed = session.group.size > 1
    rank_rows = [(r["rank"], row) for r in ranks for row in r["tensors"]]
    # The replay's rows are from before the all-reduce, and before pruning masks turn inf to NaN.
    rows = [row | {"rank": rank} if is_distributed else row for rank, row in rank_rows]
    rows = rows or reduced_rows
    if not rows and finite:
        rows = _bad_norms(session, measured, 0)
    bad_ranks = [f"rank {r['rank']}" for r in ranks if r["micro_batch"] is not None]
    what = next(r["what"] for r in ranks if r["what"])
    what += f" ({', '.join(bad_ranks)})" if is_distributed and bad_ranks else ""
    details = {
        "loss": json_number(measured.loss.item()),
        "gradient_norm": json_number(measured.gradient_norm.item()),
        "lr": begun.lr,
        "ranks": ranks,
    }
    modules = [r["first_module"] for r in ranks if r["first_module"]]
    error = _error(session, what, iteration, "before the update", rows, details, *modules)
    error.tensors, error.undone = _batch(session, begun), True
    return error


def _replay(session: TrainingSession, begun: StepSnapshot) -> dict[str, Any]:
    """Repeat the step on this rank without communication, up to the first bad micro-batch."""
    report: dict[str, Any] = {"losses": [], "micro_batch": None, "first_module": "", "tensors": []}
    begun.undo(session)
    # Without communication, also if the parameters are sharded.
    model = session.state.whole_model()
    for i, (x_BT, y_BT) in enumerate(on_device(session, begun.micro_batches)):
        model.zero_grad(set_to_none=True)
        module = FirstNonFiniteModule()
        with autocast(session.config.machine), module.watching(model):
            loss = model(x_BT, y_BT)
        finite = math.isfinite(loss.item())
        report["losses"].append(json_number(loss.item()))
        rows = []
        if not finite:
            rows = find_nonfinite(model.named_parameters(), "weight")
        elif not session.state.scaler.is_enabled():
            loss.backward()
            gradients = ((name, p.grad) for name, p in model.named_parameters())
            rows = find_nonfinite(gradients, "gradient")
        if rows or not finite:
            report |= {"micro_batch": i, "first_module": module.name, "tensors": to_json_rows(rows)}
            break
    return report


def _batch(session: TrainingSession, begun: StepSnapshot) -> dict[str, Tensor]:
    """Gather token ids ``x``, ``y`` [R, N, B, T] and generator states [R, bytes] of all ranks."""
    tensors = {
        "x": torch.stack([x_BT for x_BT, _ in begun.micro_batches]),
        "y": torch.stack([y_BT for _, y_BT in begun.micro_batches]),
    }
    tensors |= {f"rng.{name}": state for name, state in begun.rng.items()}
    return {name: session.group.gather(tensor) for name, tensor in tensors.items()}


def _after_update(
    session: TrainingSession, measured: StepMetrics, iteration: int, what: str
) -> NumericsError:
    """Build an error from loss and gradient norms; the gradients no longer exist."""
    finite = math.isfinite(measured.loss.item())
    rows = _bad_norms(session, measured, None) if finite else []
    details = {
        "loss": json_number(measured.loss.item()),
        "gradient_norm": json_number(measured.gradient_norm.item()),
    }
    return _error(session, what, iteration, "after the update", rows, details)


def _bad_norms(
    session: TrainingSession, measured: StepMetrics, count: int | None
) -> list[dict[str, Any]]:
    """Return a row for each gradient with a non-finite norm; ``count`` is its bad elements.

    A count of 0 means that all elements are finite and the norm overflows fp32.
    """
    norms = zip(
        session.state.model.named_parameters(), measured.gradient_norms.tolist(), strict=True
    )
    return [
        {
            "param": name,
            "holds": "gradient",
            "shape": list(p.shape),
            "dtype": str(p.dtype).removeprefix("torch."),
            "device": str(p.device),
            **dict.fromkeys(("nonfinite", "nan", "inf"), count),
            "first_bad_index": None,
        }
        for (name, p), norm in norms
        if not math.isfinite(norm)
    ]


def _error(
    session: TrainingSession,
    what: str,
    iteration: int,
    phase: str,
    rows: list[dict[str, Any]],
    details: dict[str, Any],
    *modules: str,
) -> NumericsError:
    train = session.config.train
    record = {
        "what": what,
        "iteration": iteration,
        "found": phase,
        "tensors": rows,
        # Seed and number determine each sequence.
        "sequences": {"first": (iteration - 1) * train.global_batch, "count": train.global_batch},
        "seed": session.config.seed,
        "micro_batch": train.batch_size,
        "accumulation": train.grad_accumulation,
        **details,
    }
    cause = _cause(rows, modules, phase)
    advice = _ADVICE
    if phase == "after the update":
        advice = f"set CHECK_NUMERICS=y to check before the update, or {_ADVICE}"
    problem = Problem(
        f"{what} at it {iteration}, {cause}",
        str(session.run.numerics_failure),
        advice,
        code="numerics.non-finite",
    )
    return NumericsError(problem, record)


def _cause(rows: list[dict[str, Any]], modules: tuple[str, ...], phase: str) -> str:
    """Describe the most likely origin of the non-finite values."""
    if rows and rows[0]["nonfinite"] == 0:
        return f"all gradients are finite, but the norm of {rows[0]['param']} overflows"
    if rows:
        kind = "gradient of " * (rows[0]["holds"] == "gradient")
        return f"first bad tensor {kind}{rows[0]['param']}"
    if modules:
        return f"all weights are finite, first bad output from {modules[0]}"
    return f"found {phase}"


def _format_value(number: float) -> str:
    return "NaN" if math.isnan(number) else "infinite"


# Records of a step with non-finite values, from which the step can be replayed.


SCHEMA_VERSION = 1


def write_numerics_failure(session: TrainingSession, error: NumericsError) -> list[str]:
    """Write numerics_failure.json and the offending batch. Return the log lines.

    If the step was rolled back, a checkpoint of its start exists and resuming repeats the step.
    """
    run = session.run
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **error.record,
        "checkpoint": session.state.saved_at if error.undone else None,
        "batch": None,
        "replay": f"make RUNS={session.label}",
    }
    if error.tensors:
        contiguous = {name: t.contiguous() for name, t in error.tensors.items()}
        write_atomic(run.numerics_batch, safetensors.torch.save(contiguous))
        record["batch"] = {
            "file": run.numerics_batch.name,
            "sha256": sha256_file(run.numerics_batch),
        }
    else:
        # Leftover of an earlier failure.
        run.numerics_batch.unlink(missing_ok=True)
    write_json(run.numerics_failure, record)
    rows = error.record["tensors"]
    by_rank = ("rank",) if any("rank" in row for row in rows) else ()
    lines = format_table(rows, by_rank) if rows else []
    effect = "repeats the step" if error.undone else "resumes from the newest checkpoint"
    return [*lines, f"{run.numerics_failure}: {record['replay']} {effect}"]


def archive_resolved_failure(session: TrainingSession) -> None:
    """Archive the failure record of an earlier start after this start has succeeded.

    The record is kept, because a deterministic step should have failed again.
    """
    run = session.run
    paths = [path for path in (run.numerics_failure, run.numerics_batch) if path.exists()]
    if not paths:
        return
    run.overcome.mkdir(exist_ok=True)
    for path in paths:
        path.replace(run.overcome / path.name)
    text = "an earlier start failed with non-finite values, but this start did not"
    session.records.line("WARN", f"{text}: {run.overcome}")
