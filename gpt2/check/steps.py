"""Training goes on: several steps, accumulation, other batch shapes, a loss that falls.

B micro-batch, T tokens.
"""

import itertools
import math

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.subject import Subject
from gpt2.training.session import Session
from lib.optim.schedule import learning_rate_at

_REPEATED = 3
# Rows and lengths of batches that follow each other.
_SHAPES = ((3, 9), (1, 17), (2, 5))
# fp32 sums in another order.
_TOLERANCE = 1e-4


def check(subject: Subject) -> list[Finding]:
    """The trial's losses, then one batch again and again from the start, then other shapes."""
    losses = {f"step {i}": loss for i, loss in enumerate(subject.trial.losses, 1)}
    workshop, small = subject.workshop, subject.exact
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
    return found + _updates(subject) + _batches(subject.trial.rehearsal.session)


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


def _updates(subject: Subject) -> list[Finding]:
    """Each step of the trial ran at its schedule's learning rate, on clipped gradients."""
    config, session = subject.shrunk, subject.trial.rehearsal.session
    clip = config.train.grad_clip or math.inf
    for i, update in enumerate(subject.trial.updates):
        progress = i / session.budget.iterations
        wanted = learning_rate_at(config.schedule, i, progress, session.budget.warmup_progress)
        if not math.isclose(update.lr, wanted, rel_tol=1e-9):
            return [Finding(f"a learning rate of {wanted:g} at step {i + 1}", f"{update.lr:g}")]
        norm, wanted = update.clipped_norm.item(), min(clip, update.gradient_norm.item())
        if not math.isclose(norm, wanted, rel_tol=_TOLERANCE):
            what = f"gradients of norm {wanted:g} for the optimizer at step {i + 1}"
            return [Finding(what, f"{norm:g}")]
    return []


def _batches(session: Session) -> list[Finding]:
    """Two steps read different tokens."""
    (first, *_), (second, *_) = itertools.islice(session.batches(), 2)
    if torch.equal(first[0], second[0]):
        return [Finding("other tokens in every step", "two steps read the same")]
    return []
