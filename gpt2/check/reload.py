"""A checkpoint holds everything: another process goes on from it to the same bits.

B batch, T tokens.
"""

from pathlib import Path

from gpt2.check.finding import Finding
from gpt2.check.rehearsal import Rehearsal
from gpt2.check.subject import Subject
from gpt2.check.trial import SAVED_AT
from gpt2.config import Config
from gpt2.training.start import resume


def check(subject: Subject) -> list[Finding]:
    """Resumes the trial half way in the partner, and compares the rest of it."""
    trial = subject.trial
    arguments = (trial.config, subject.workshop.folder, trial.folder)
    at, losses, digest = subject.workshop.partner.call("gpt2.check.reload:finish", *arguments)
    found = []
    if at != SAVED_AT:
        found.append(Finding(f"a checkpoint of step {SAVED_AT}", f"resumes at step {at}"))
    for i, (mine, its) in enumerate(zip(trial.losses[SAVED_AT:], losses), SAVED_AT + 1):
        if mine != its:
            text = f"{its!r} after a reload, {mine!r} without"
            found.append(Finding(f"the same loss at step {i}", text))
            break
    if digest != trial.digest:
        found.append(Finding("the same weights in the end", "they differ after a reload"))
    return found


def finish(config: Config, build_dir: Path, folder: Path) -> tuple[int, list[float], str]:
    """Resume a run and train it to its end: the step it resumed at, losses, digest of weights."""
    rehearsal = Rehearsal(config, build_dir, folder)
    resume(rehearsal.session)
    start = rehearsal.session.iteration
    for _ in range(start, rehearsal.session.budget.iterations):
        rehearsal.step()
    rehearsal.close()
    return start, rehearsal.losses, rehearsal.digest()
