"""Notes on a configuration: chosen kernels, and warnings. Imports no torch."""

from collections.abc import Iterable

from gpt2.attention.backends import gpu_notes
from gpt2.attention.options import ConfigNote
from gpt2.config import Config
from gpt2.training.budget import TrainingBudget
from lib.env import speed


def notes(config: Config) -> list[ConfigNote]:
    """Return the notes of one run."""
    model, machine = config.model, config.machine
    lines = list(model.attention.pattern.notes(model.shape))
    if machine.device == "cuda":
        lines += gpu_notes(model.attention, model.shape, model.backends("gpu"))
        if model.loss_backend == "auto" and not machine.compile:
            text = "loss by liger-kernel, if it is installed and supports the GPU; it is compared "
            lines.append(ConfigNote(f"{text}with torch's on the GPU before training"))
    elif speed.emulates_bf16(machine):
        lines.append(ConfigNote(speed.EMULATED, warns=True))
    warm_up, iterations = config.schedule.warmup_steps, TrainingBudget(config).iterations
    if 0 < iterations <= warm_up:
        text = (
            f"WARMUP_STEPS={warm_up}: the run ends in its warm-up, after {iterations:,} iterations"
        )
        lines.append(ConfigNote(text, warns=True))
    return lines


def note_lines(runs: Iterable[tuple[str, Config]]) -> list[str]:
    """Format the distinct notes of labelled runs: ``nsa/02-nsa s1 +7: query-key pairs, …``.

    ``+7`` counts the other runs with the same note.
    """
    labels_by_note: dict[ConfigNote, list[str]] = {}
    # The seeds of a variant share one model.
    by_variant: dict[tuple[int, int], list[ConfigNote]] = {}
    for label, config in runs:
        key = id(config.model), id(config.schedule)
        if key not in by_variant:
            by_variant[key] = notes(config)
        for note in by_variant[key]:
            labels_by_note.setdefault(note, []).append(label)
    return [
        f"{note.tag:<5} {labels[0]}{f' +{len(labels) - 1}' * bool(labels[1:])}: {note.text}"
        for note, labels in labels_by_note.items()
    ]
