"""Training twice with the same seed gives identical bits."""

import torch

from gpt2.check.finding import Finding
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.subject import Subject
from gpt2.check.trial import WATCHED


def check(subject: Subject) -> list[Finding]:
    """Repeat the first steps of the trial, with an evaluation between them."""
    trial, workshop = subject.trial, subject.workshop
    rehearsal = Rehearsal(subject.shrunk, workshop.prepared(subject.shrunk), workshop.new_folder())
    for name, weight in rehearsal.session.weights().items():
        if not torch.equal(weight, trial.start[name]):
            expected = f"the same initial {name} for the same seed"
            return [Finding("same-initial-weights", expected, "other values")]
    for i in range(WATCHED):
        loss = rehearsal.step()
        if loss != trial.losses[i]:
            text = f"{trial.losses[i]!r}, then {loss!r}" + (", after an evaluation" if i else "")
            expected = f"the same loss at step {i + 1} for the same seed"
            return [Finding("same-loss", expected, text)]
        if i == 0:
            rehearsal.session.evaluate(rehearsal.session.model)
    rehearsal.close()
    for name, weight in rehearsal.session.weights().items():
        if not torch.equal(weight, trial.watched[name]):
            expected = f"the same trained {name} for the same seed"
            return [Finding("same-trained-weights", expected, "other values")]
    return []
