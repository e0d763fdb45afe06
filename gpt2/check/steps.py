"""Training works: several steps, gradient accumulation, other batch shapes, a falling loss.

B micro-batch, T tokens.
"""

import math

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.given import given
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.training.session import Session

_REPEATED = 3
# An interval longer than any of these runs.
_NEVER = 1000
# Rows and lengths of consecutive batches.
_SHAPES = ((3, 9), (1, 17), (2, 5))
# fp32 sums in a different order.
_TOLERANCE = 1e-4


def check(subject: Subject) -> list[Finding]:
    """Check the trial's losses, a repeated batch from the start, and other batch shapes."""
    losses = {f"step {i}": loss for i, loss in enumerate(subject.trial.losses, 1)}
    workshop, small = subject.workshop, subject.exact
    if small.pruning.name != "none":
        # Training cannot compensate the large prunings of a ramp of few iterations.
        small = changed(small, PRUNING_FREQUENCY=_NEVER)
    rehearsal = Rehearsal(small, workshop.prepared(small), workshop.new_folder())
    findings, repeated = _repeat(subject, rehearsal)
    losses |= {f"repeated batch, step {i}": loss for i, loss in enumerate(repeated, 1)}
    with subject.in_pieces():
        for rows, length in _SHAPES:
            ids_BT = subject.tokens(rows, length)
            loss = rehearsal.step([(ids_BT[:, :-1], ids_BT[:, 1:])])
            losses[f"a batch of {rows} x {length - 1}"] = loss
    rehearsal.close()
    findings += [
        Finding("finite-loss", "a finite loss", f"{loss} at {location}")
        for location, loss in losses.items()
        if not math.isfinite(loss)
    ]
    return findings + given(subject.trial)


def _repeat(subject: Subject, rehearsal: Rehearsal) -> tuple[list[Finding], list[float]]:
    """Train on one batch, alternating between one piece and two micro-batches.

    Checks that the losses fall, and that loss and gradient norm of the second step are those of the
    whole batch. Returns the findings and the losses.
    """
    ids_BT = subject.tokens(2)
    x_BT, y_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    halves = list(zip(x_BT.split(1), y_BT.split(1)))
    findings, losses = [], []
    for i in range(_REPEATED):
        if i == 1:
            expected = _whole_batch(rehearsal.session, x_BT, y_BT)
        losses.append(rehearsal.step(halves if i % 2 else [(x_BT, y_BT)]))
        if i == 1:
            pairs = zip(("loss", "gradient norm"), (losses[1], rehearsal.gradient_norm), expected)
            findings += [
                Finding(
                    "accumulation",
                    f"the {what} of the whole batch ({whole}) from two micro-batches",
                    f"{actual}",
                )
                for what, actual, whole in pairs
                if abs(actual - whole) > _TOLERANCE * abs(whole)
            ]
    if not losses[-1] < losses[0]:
        text = f"{losses[0]:.4f}, then {losses[-1]:.4f} after {_REPEATED} steps"
        findings.append(Finding("falling-loss", "a falling loss on a repeated batch", text))
    return findings, losses


def _whole_batch(session: Session, x_BT: Tensor, y_BT: Tensor) -> tuple[float, float]:
    """Return loss and gradient norm at the session's weights, without accumulation."""
    loss = session.model(x_BT, y_BT)
    loss.backward()
    session.pruner.mask_gradients()
    gradients = [p.grad for p in session.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    session.optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()
