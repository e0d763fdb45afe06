"""The interface of a tracker, and the facts of a run that it receives."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from lib.config.field import SymbolValue
from lib.files import write_json
from lib.json_files import read_json_object
from lib.runs.record import JsonRecord

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TrackerMetadata:
    """Facts of a run that a tracker receives before the first metric."""

    # Unchanged when the run is resumed.
    id: str
    project: str
    name: str
    # The study and its step that this run trains.
    study: str
    step: str
    # Entries of the displayed configuration, under the names that query scripts use.
    settings: Mapping[str, Any]
    # Every Kconfig symbol's value.
    symbols: Mapping[str, SymbolValue]

    @property
    def config(self) -> dict[str, Any]:
        """Return settings and symbols as one flat dict.

        Setting names are lower case and symbols upper case, so they cannot collide.
        """
        return {**self.symbols, **self.settings, "study": self.study, "step": self.step}

    def write(self, path: Path) -> None:
        """Write the facts as JSON."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the facts that ``write`` wrote. Raises ConfigError if they are unreadable."""
        return JsonRecord(path, read_json_object(path)).section(cls)


@dataclass(frozen=True)
class TrackerTable:
    """A table for trackers. The first column identifies a row; None is a missing value."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]


class Tracker(Protocol):
    """A tracker backend, built from its options and the ``RunDir`` in a separate process.

    An error ends only the tracker's process.
    """

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open the run; ``resumed`` if this tracker has already received a part of it."""

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Log ``metrics`` at ``iteration``, which never decreases and may be repeated."""

    def table(self, name: str, table: TrackerTable, iteration: int) -> None:
        """Log ``table``, which replaces an earlier one of this name."""

    def kept(self, told: int) -> int:
        """Return the newest iteration up to which all logged data is durable.

        ``told`` is the newest logged iteration. The method is called at the end, and before logging
        to a run whose previous process died: libraries queue data, and some drop it silently.
        """

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Flush all data and close the run; ``settings`` are those known only at the end."""
