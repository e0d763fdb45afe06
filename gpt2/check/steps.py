"""Training goes on: several steps, accumulation, other batch shapes, a loss that falls."""

import math

from gpt2.check.finding import Finding
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.subject import Subject

_REPEATED = 3
# Rows and lengths of batches that follow each other.
_SHAPES = ((3, 9), (1, 17), (2, 5))


def check(subject: Subject) -> list[Finding]:
    """The trial's losses, then other shapes, then one batch again and again from the start."""
    trial = subject.trial
    losses = {f"step {i}": loss for i, loss in enumerate(trial.losses, 1)}
    workshop = subject.workshop
    rehearsal = Rehearsal(subject.shrunk, workshop.prepared(subject.shrunk), workshop.new_folder())
    batch_BT = subject.tokens(2)
    again = [
        rehearsal.step([(batch_BT[:, :-1], batch_BT[:, 1:])] * (1 + i % 2))
        for i in range(_REPEATED)
    ]
    losses |= {f"repeated batch, step {i}": loss for i, loss in enumerate(again, 1)}
    with subject.in_pieces():
        for rows, length in _SHAPES:
            ids_BT = subject.tokens(rows, length)
            loss = rehearsal.step([(ids_BT[:, :-1], ids_BT[:, 1:])])
            losses[f"a batch of {rows} x {length - 1}"] = loss
    rehearsal.close()
    found = [
        Finding("a finite loss", f"{loss} at {where}")
        for where, loss in losses.items()
        if not math.isfinite(loss)
    ]
    if not again[-1] < again[0]:
        text = f"{again[0]:.4f}, after {_REPEATED} steps {again[-1]:.4f}"
        found.append(Finding("a loss that falls on a repeated batch", text))
    return found
