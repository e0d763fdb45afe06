"""What a tracker is told of a run, and what it has to do with it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from lib.binding import Value
from lib.files import write_json

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Facts:
    """What a tracker is told before the first metric."""

    # Stays the same when the run is resumed.
    id: str
    project: str
    name: str
    # Study, and the step of it that the run is.
    study: str
    step: str
    # What is shown as the run's configuration, in the names that scripts ask for.
    settings: Mapping[str, Any]
    # Every Kconfig symbol's value.
    symbols: Mapping[str, Value]

    @property
    def config(self) -> dict[str, Any]:
        """All of it, one level deep; names in small letters and symbols in capitals never meet."""
        return {**self.symbols, **self.settings, "study": self.study, "step": self.step}

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote. OSError or ValueError where that cannot be read."""
        record = json.loads(path.read_text())
        record.pop("schema_version")
        return cls(**record)


class Tracker(Protocol):
    """Built from its options and the ``RunDir``, in a process of its own: any error ends only that."""

    def start(self, facts: Facts, *, resumed: bool) -> None:
        """Open the run; ``resumed`` when this tracker has been told a part of it before."""

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Show ``metrics`` at ``iteration``, which never decreases and may come twice."""

    def kept(self, told: int) -> int:
        """The newest iteration up to which all that was told surely outlives this process.

        ``told`` is the newest that was told. Asked at the end, and before anything is told to a run
        that was lost: libraries have queues of their own, and some lose them in silence.
        """

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Keep or send all that is left; ``settings`` are those known only at the end."""
