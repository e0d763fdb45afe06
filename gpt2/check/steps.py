"""Training goes on: several steps, accumulation, other batch shapes, a loss that falls.

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
# Longer than any of these trainings.
_NEVER = 1000
# Rows and lengths of batches that follow each other.
_SHAPES = ((3, 9), (1, 17), (2, 5))
# fp32 sums in another order.
_TOLERANCE = 1e-4


def check(subject: Subject) -> list[Finding]:
    """The trial's losses, then one batch again and again from the start, then other shapes."""
    losses = {f"step {i}": loss for i, loss in enumerate(subject.trial.losses, 1)}
    workshop, small = subject.workshop, subject.exact
    if small.pruning.name != "none":
        # What a ramp of a few iterations takes away at once, a step cannot learn.
        small = changed(small, PRUNING_FREQUENCY=_NEVER)
    rehearsal = Rehearsal(small, workshop.prepared(small), workshop.new_folder())
    found, again = _repeat(subject, rehearsal)
    losses |= {f"repeated batch, step {i}": loss for i, loss in enumerate(again, 1)}
    with subject.in_pieces():
        for rows, length in _SHAPES:
            ids_BT = subject.tokens(rows, length)
            loss = rehearsal.step([(ids_BT[:, :-1], ids_BT[:, 1:])])
            losses[f"a batch of {rows} x {length - 1}"] = loss
    rehearsal.close()
    found += [
        Finding("a finite loss", f"{loss} at {where}")
        for where, loss in losses.items()
        if not math.isfinite(loss)
    ]
    return found + given(subject.trial)


def _repeat(subject: Subject, rehearsal: Rehearsal) -> tuple[list[Finding], list[float]]:
    """Steps on one batch, whole and in two micro-batches by turns: the losses, which fall.

    Of the second step, loss and gradient are those of the whole batch and of nothing before it.
    """
    ids_BT = subject.tokens(2)
    x_BT, y_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    halves = list(zip(x_BT.split(1), y_BT.split(1)))
    found, losses = [], []
    for i in range(_REPEATED):
        if i == 1:
            wanted = _plain(rehearsal.session, x_BT, y_BT)
        losses.append(rehearsal.step(halves if i % 2 else [(x_BT, y_BT)]))
        if i == 1:
            pairs = zip(("loss", "gradient norm"), (losses[1], rehearsal.gradient_norm), wanted)
            found += [
                Finding(f"the {what} of the whole batch from two micro-batches", f"{its} of {all_}")
                for what, its, all_ in pairs
                if abs(its - all_) > _TOLERANCE * abs(all_)
            ]
    if not losses[-1] < losses[0]:
        text = f"{losses[0]:.4f}, after {_REPEATED} steps {losses[-1]:.4f}"
        found.append(Finding("a loss that falls on a repeated batch", text))
    return found, losses


def _plain(session: Session, x_BT: Tensor, y_BT: Tensor) -> tuple[float, float]:
    """Loss and gradient norm at the session's weights, in one piece."""
    loss = session.model(x_BT, y_BT)
    loss.backward()
    session.pruner.mask_gradients()
    gradients = [p.grad for p in session.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    session.optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()
