"""What the sizes of a run mean for its attention, for whoever plans, checks or watches it."""

from collections.abc import Iterable

from gpt2.attention.options import Note
from gpt2.config import Config


def notes(config: Config) -> list[Note]:
    """The notes of one run."""
    return config.model.attention.pattern.notes(config.model.shape)


def note_lines(runs: Iterable[tuple[str, Config]]) -> list[str]:
    """The notes of labelled runs, each once: ``nsa/02-nsa s1 +7: query-key pairs, …``."""
    found: dict[Note, list[str]] = {}
    for label, config in runs:
        for note in notes(config):
            found.setdefault(note, []).append(label)
    return [
        f"{note.tag:<5} {labels[0]}{f' +{len(labels) - 1}' * bool(labels[1:])}: {note.text}"
        for note, labels in found.items()
    ]
