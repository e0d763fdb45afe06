"""Remarks on a run's attention sizes, shown by the plan, check and watch commands."""

from collections.abc import Iterable

from gpt2.attention.options import Note
from gpt2.config import Config


def notes(config: Config) -> list[Note]:
    """Return the notes of one run."""
    return config.model.attention.pattern.notes(config.model.shape)


def note_lines(runs: Iterable[tuple[str, Config]]) -> list[str]:
    """Format the distinct notes of labelled runs: ``nsa/02-nsa s1 +7: query-key pairs, …``.

    ``+7`` counts the other runs with the same note.
    """
    labels_by_note: dict[Note, list[str]] = {}
    for label, config in runs:
        for note in notes(config):
            labels_by_note.setdefault(note, []).append(label)
    return [
        f"{note.tag:<5} {labels[0]}{f' +{len(labels) - 1}' * bool(labels[1:])}: {note.text}"
        for note, labels in labels_by_note.items()
    ]
