"""Notes on a configuration: chosen kernels, and warnings. Imports no torch."""

from collections.abc import Iterable

from gpt2.attention.backends import gpu_notes
from gpt2.attention.options import ConfigNote
from gpt2.config import Config
from gpt2.training.budget import run_budget
from lib.env import speed


def notes(config: Config) -> list[ConfigNote]:
    """Return the notes of one run."""
    return [*_model_notes(config), *_schedule_notes(config)]


def _model_notes(config: Config) -> list[ConfigNote]:
    model = config.model
    found = list(model.attention.pattern.notes(model.shape))
    if config.machine.device == "cuda":
        found += gpu_notes(model.attention, model.shape, model.backends("gpu"))
        if model.loss_backend == "auto" and not config.machine.compile:
            compared = "it is compared with torch's on the GPU before training"
            found.append(
                ConfigNote(
                    f"loss by liger-kernel, if it is installed and supports the GPU; {compared}"
                )
            )
    elif speed.emulates_bf16(config.machine):
        found.append(ConfigNote(speed.EMULATED, warns=True))
    return found


def _schedule_notes(config: Config) -> list[ConfigNote]:
    """Return a warning if the learning rate never reaches its peak."""
    warm_up, iterations = config.schedule.warmup_steps, run_budget(config).iterations
    if not 0 < iterations <= warm_up:
        return []
    text = f"WARMUP_STEPS={warm_up}: the run ends in its warm-up, after {iterations:,} iterations"
    return [ConfigNote(text, warns=True)]


def note_lines(runs: Iterable[tuple[str, Config]]) -> list[str]:
    """Format the distinct notes of labelled runs: ``nsa/02-nsa s1 +7: query-key pairs, …``.

    ``+7`` counts the other runs with the same note.
    """
    labels_by_note: dict[ConfigNote, list[str]] = {}
    # The runs of a variant share one model and machine for all seeds.
    known: dict[tuple[int, int], list[ConfigNote]] = {}
    for label, config in runs:
        key = id(config.model), id(config.machine)
        if key not in known:
            known[key] = _model_notes(config)
        for note in (*known[key], *_schedule_notes(config)):
            labels_by_note.setdefault(note, []).append(label)
    return [
        f"{note.tag:<5} {labels[0]}{f' +{len(labels) - 1}' * bool(labels[1:])}: {note.text}"
        for note, labels in labels_by_note.items()
    ]
