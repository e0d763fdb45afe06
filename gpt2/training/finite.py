"""Non-finite losses and gradients: detection, diagnosis per rank, and an error on all ranks.

Shape suffixes: R ranks, N micro-batches, B micro-batch, T tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpt2.training.passes import Begun, Measured, on_device
from gpt2.training.session import Session
from lib.errors import Problem
from lib.machine.setup import autocast
from lib.numerics.guard import FirstBadModule, NumericsError, as_rows, bad_tensors, number

_ADVICE = "try a lower LEARNING_RATE, a longer WARMUP_STEPS or GRAD_CLIP=1.0"
# Part of the message of torch's anomaly mode.
_ANOMALY_MESSAGE = "returned nan values"


def require_finite(
    session: Session, measured: Measured, iteration: int, begun: Begun | None = None
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
    elif not math.isfinite(norm) and not session.scaler.is_enabled():
        what = f"gradient norm is {_format_value(norm)}"
    if begun is not None and session.group.any(bool(what)):
        raise _before_update(session, measured, iteration, begun, what)
    if begun is None and what:
        raise _after_update(session, measured, iteration, what)


def bad_evaluation(session: Session, loss: float) -> NumericsError:
    """Return the error of a non-finite validation loss."""
    what = f"validation loss is {loss}"
    rows = as_rows(bad_tensors(session.weights().items(), "weight"))
    return _error(session, what, session.iteration, "in an evaluation", rows, {})


@contextmanager
def anomaly_detection(session: Session) -> Iterator[None]:
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
            session, what, session.iteration + 1, "in the backward pass", [], rank
        )
        numerics_error.alone = is_distributed
        raise numerics_error from error


def _before_update(
    session: Session, measured: Measured, iteration: int, begun: Begun, what: str
) -> NumericsError:
    """Roll back the step and build an error with the diagnostics of every rank."""
    if math.isfinite(measured.loss.item()):
        gradients = ((name, p.grad) for name, p in session.model.named_parameters())
        reduced_rows = as_rows(bad_tensors(gradients, "gradient"))
    else:
        # Gradients of a non-finite loss carry no information.
        reduced_rows = as_rows(bad_tensors(session.weights().items(), "weight"))
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
    if not rows and math.isfinite(measured.loss.item()):
        rows = _bad_norms(session, measured, 0)
    bad_ranks = [f"rank {r['rank']}" for r in ranks if r["micro_batch"] is not None]
    what = next(r["what"] for r in ranks if r["what"])
    what += f" ({', '.join(bad_ranks)})" if is_distributed and bad_ranks else ""
    details = {
        "loss": number(measured.loss.item()),
        "gradient_norm": number(measured.gradient_norm.item()),
        "lr": begun.lr,
        "ranks": ranks,
    }
    modules = [r["first_module"] for r in ranks if r["first_module"]]
    error = _error(session, what, iteration, "before the update", rows, details, *modules)
    error.tensors, error.undone = _batch(session, begun), True
    return error


def _replay(session: Session, begun: Begun) -> dict[str, Any]:
    """Repeat the step on this rank without communication, up to the first bad micro-batch."""
    report: dict[str, Any] = {"losses": [], "micro_batch": None, "first_module": "", "tensors": []}
    begun.undo(session)
    for i, (x_BT, y_BT) in enumerate(on_device(session, begun.micro_batches)):
        session.optimizer.zero_grad(set_to_none=True)
        module = FirstBadModule()
        with autocast(session.config.machine), module.watching(session.model):
            loss = session.model(x_BT, y_BT)
        finite = math.isfinite(loss.item())
        report["losses"].append(number(loss.item()))
        rows = []
        if not finite:
            rows = bad_tensors(session.weights().items(), "weight")
        elif not session.scaler.is_enabled():
            loss.backward()
            gradients = ((name, p.grad) for name, p in session.model.named_parameters())
            rows = bad_tensors(gradients, "gradient")
        if rows or not finite:
            report |= {"micro_batch": i, "first_module": module.name, "tensors": as_rows(rows)}
            break
    return report


def _batch(session: Session, begun: Begun) -> dict[str, Tensor]:
    """Gather token ids ``x``, ``y`` [R, N, B, T] and generator states [R, bytes] of all ranks."""
    tensors = {
        "x": torch.stack([x_BT for x_BT, _ in begun.micro_batches]),
        "y": torch.stack([y_BT for _, y_BT in begun.micro_batches]),
    }
    tensors |= {f"rng.{name}": state for name, state in begun.rng.items()}
    return {name: session.group.gather(tensor) for name, tensor in tensors.items()}


def _after_update(session: Session, measured: Measured, iteration: int, what: str) -> NumericsError:
    """Build an error from loss and gradient norms; the gradients no longer exist."""
    finite = math.isfinite(measured.loss.item())
    rows = _bad_norms(session, measured, None) if finite else []
    details = {
        "loss": number(measured.loss.item()),
        "gradient_norm": number(measured.gradient_norm.item()),
    }
    return _error(session, what, iteration, "after the update", rows, details)


def _bad_norms(session: Session, measured: Measured, count: int | None) -> list[dict[str, Any]]:
    """Return a row for each gradient with a non-finite norm; ``count`` is its bad elements.

    A count of 0 means that all elements are finite and the norm overflows fp32.
    """
    norms = zip(session.model.named_parameters(), measured.gradient_norms.tolist(), strict=True)
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
    session: Session,
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
