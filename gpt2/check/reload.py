"""A checkpoint is complete: another process resumes from it with identical bits.

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
    """Resume the trial from its checkpoint in the partner, and compare the remaining steps."""
    trial = subject.trial
    arguments = (trial.config, subject.workshop.folder, trial.folder)
    start, losses, digest = subject.workshop.partner.call("gpt2.check.reload:finish", *arguments)
    findings = []
    if start != SAVED_AT:
        expected = f"a resume at step {SAVED_AT}"
        findings.append(Finding("resumed-step", expected, f"a resume at step {start}"))
    for i, (loss, resumed_loss) in enumerate(zip(trial.losses[SAVED_AT:], losses), SAVED_AT + 1):
        if loss != resumed_loss:
            text = f"{resumed_loss!r} after a resume, {loss!r} without"
            findings.append(Finding("resumed-loss", f"the same loss at step {i}", text))
            break
    if digest != trial.digest:
        expected = "the same weights at the end"
        findings.append(Finding("resumed-weights", expected, "other weights after a resume"))
    return findings


def finish(config: Config, build_dir: Path, folder: Path) -> tuple[int, list[float], str]:
    """Resume a run and train it to its end.

    Returns the step at which it resumed, its losses, and the digest of its weights.
    """
    rehearsal = Rehearsal(config, build_dir, folder)
    resume(rehearsal.session)
    start = rehearsal.session.iteration
    for _ in range(start, rehearsal.session.budget.iterations):
        rehearsal.step()
    rehearsal.close()
    return start, rehearsal.losses, rehearsal.digest()
