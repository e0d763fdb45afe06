"""A step whose numbers are not finite: finding it, finding whose they are, ending all ranks alike.

R ranks, N micro-batches, B micro-batch, T tokens.
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
# How torch's anomaly mode puts it.
_ANOMALY = "returned nan values"


def require_finite(
    session: Session, measured: Measured, iteration: int, begun: Begun | None = None
) -> None:
    """NumericsError unless loss and gradients of ``iteration`` are finite.

    With ``begun``, before the update: every rank has to call it, all raise if one has to, and the
    step is made once more without exchange to see whose numbers they are. Without, when the row is
    written: loss and norms are the same on all ranks. fp16 gradients overflow now and then by
    design: the scaler skips such a step by itself.
    """
    loss, norm = torch.stack((measured.loss, measured.gradient_norm)).tolist()
    what = ""
    if not math.isfinite(loss):
        what = f"loss is {_word(loss)}"
    elif not math.isfinite(norm) and not session.scaler.is_enabled():
        what = f"gradient norm is {_word(norm)}"
    if begun is not None and session.group.any(bool(what)):
        raise _before_update(session, measured, iteration, begun, what)
    if begun is None and what:
        raise _after_update(session, measured, iteration, what)


def bad_evaluation(session: Session, loss: float) -> NumericsError:
    """The error of a validation loss that is not finite."""
    what = f"validation loss is {loss}"
    rows = as_rows(bad_tensors(session.weights().items(), "weight"))
    return _error(session, what, session.iteration, "in an evaluation", rows, {})


@contextmanager
def anomaly_detection(session: Session) -> Iterator[None]:
    """With DETECT_ANOMALY, a NaN in the backward pass inside is a NumericsError naming its operation.

    The warning that comes with it, in the run's log, has the lines of the forward pass.
    """
    if not session.config.numerics.detect_anomaly:
        yield
        return
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    except RuntimeError as error:
        if _ANOMALY not in str(error):
            raise
        several = session.group.size > 1
        what = f"anomaly: {str(error).splitlines()[0].rstrip('.')}"
        what += f" (rank {session.group.rank})" if several else ""
        where, who = "in the backward pass", {"rank": session.group.rank} if several else {}
        found = _error(session, what, session.iteration + 1, where, [], who)
        found.alone = several
        raise found from error


def _before_update(
    session: Session, measured: Measured, iteration: int, begun: Begun, what: str
) -> NumericsError:
    """What every rank knows of the step, and the step undone."""
    if math.isfinite(measured.loss.item()):
        gradients = ((name, p.grad) for name, p in session.model.named_parameters())
        seen = as_rows(bad_tensors(gradients, "gradient"))
    else:
        # Gradients of such a loss say nothing.
        seen = as_rows(bad_tensors(session.weights().items(), "weight"))
    own = {"rank": session.group.rank, "what": what, **_once_more(session, begun)}
    # With random states as the step found them.
    own["rng"] = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in begun.rng.items()}
    begun.undo(session)
    ranks = [json.loads(text) for text in session.group.gather_text(json.dumps(own))]
    several = session.group.size > 1
    whose = [(r["rank"], row) for r in ranks for row in r["tensors"]]
    # Before pruning's masks, which turn an infinity into NaN, and before any sum.
    rows = [row | {"rank": rank} if several else row for rank, row in whose] or seen
    if not rows and math.isfinite(measured.loss.item()):
        rows = _bad_norms(session, measured, 0)
    guilty = [f"rank {r['rank']}" for r in ranks if r["micro_batch"] is not None]
    what = next(r["what"] for r in ranks if r["what"])
    what += f" ({', '.join(guilty)})" if several and guilty else ""
    more = {
        "loss": number(measured.loss.item()),
        "gradient_norm": number(measured.gradient_norm.item()),
        "lr": begun.lr,
        "ranks": ranks,
    }
    modules = [r["first_module"] for r in ranks if r["first_module"]]
    error = _error(session, what, iteration, "before the update", rows, more, *modules)
    error.tensors, error.undone = _batch(session, begun), True
    return error


def _once_more(session: Session, begun: Begun) -> dict[str, Any]:
    """The step on this rank alone, up to the first micro-batch whose numbers are not finite."""
    found: dict[str, Any] = {"losses": [], "micro_batch": None, "first_module": "", "tensors": []}
    begun.undo(session)
    for i, (x_BT, y_BT) in enumerate(on_device(session, begun.micro_batches)):
        session.optimizer.zero_grad(set_to_none=True)
        module = FirstBadModule()
        with autocast(session.config.machine), module.watching(session.model):
            loss = session.model(x_BT, y_BT)
        finite = math.isfinite(loss.item())
        found["losses"].append(number(loss.item()))
        rows = []
        if not finite:
            rows = bad_tensors(session.weights().items(), "weight")
        elif not session.scaler.is_enabled():
            loss.backward()
            gradients = ((name, p.grad) for name, p in session.model.named_parameters())
            rows = bad_tensors(gradients, "gradient")
        if rows or not finite:
            found |= {"micro_batch": i, "first_module": module.name, "tensors": as_rows(rows)}
            break
    return found


def _batch(session: Session, begun: Begun) -> dict[str, Tensor]:
    """Token ids ``x`` and ``y`` [R, N, B, T] and random states [R, bytes] of all ranks."""
    own = {
        "x": torch.stack([x_BT for x_BT, _ in begun.micro_batches]),
        "y": torch.stack([y_BT for _, y_BT in begun.micro_batches]),
    }
    own |= {f"rng.{name}": state for name, state in begun.rng.items()}
    return {name: session.group.gather(tensor) for name, tensor in own.items()}


def _after_update(session: Session, measured: Measured, iteration: int, what: str) -> NumericsError:
    """Norms are all that is left of the gradients."""
    finite = math.isfinite(measured.loss.item())
    rows = _bad_norms(session, measured, None) if finite else []
    more = {
        "loss": number(measured.loss.item()),
        "gradient_norm": number(measured.gradient_norm.item()),
    }
    return _error(session, what, iteration, "after the update", rows, more)


def _bad_norms(session: Session, measured: Measured, count: int | None) -> list[dict[str, Any]]:
    """A row for each gradient whose norm is not finite, with ``count`` bad elements of each kind.

    0 where every element is finite, and together they are longer than fp32 can say.
    """
    found = zip(session.model.named_parameters(), measured.gradient_norms.tolist(), strict=True)
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
        for (name, p), norm in found
        if not math.isfinite(norm)
    ]


def _error(
    session: Session,
    what: str,
    iteration: int,
    found: str,
    rows: list[dict[str, Any]],
    more: dict[str, Any],
    *modules: str,
) -> NumericsError:
    train = session.config.train
    record = {
        "what": what,
        "iteration": iteration,
        "found": found,
        "tensors": rows,
        # Sequence g is addressed by the seed and g alone.
        "sequences": {"first": (iteration - 1) * train.global_batch, "count": train.global_batch},
        "seed": session.config.seed,
        "micro_batch": train.batch_size,
        "accumulation": train.grad_accumulation,
        **more,
    }
    culprit = _culprit(rows, modules, found)
    advice = _ADVICE
    if found == "after the update":
        advice = f"CHECK_NUMERICS=y looks before the update; else {_ADVICE}"
    problem = Problem(
        f"{what} at it {iteration}, {culprit}", str(session.run.numerics_failure), advice
    )
    return NumericsError(problem, record)


def _culprit(rows: list[dict[str, Any]], modules: tuple[str, ...], found: str) -> str:
    """The first thing to look at."""
    if rows and rows[0]["nonfinite"] == 0:
        return f"every gradient is finite, and the norm of {rows[0]['param']} overflows"
    if rows:
        holds = "gradient of " * (rows[0]["holds"] == "gradient")
        return f"first bad tensor {holds}{rows[0]['param']}"
    if modules:
        return f"every weight is finite, first bad output that of {modules[0]}"
    return f"found {found}"


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "infinite"
