"""Which trackers a run is mirrored to, and under which names; imports none of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lib.binding import Value, bind, symbol
from lib.errors import Problem
from lib.tracking import TRACKERS

# The others are extras of pyproject.toml.
_IN_THE_DEFAULT_SET = {"wandb"}


@dataclass(frozen=True)
class TrackingConfig:
    """No tracker, one or several; nothing here can change a run's result."""

    # Options of each tracker.
    trackers: tuple[Any, ...]
    # "" stands for a name made from the study and the run's directory.
    project: str = symbol("TRACKER_PROJECT", identity=False)
    run_name: str = symbol("TRACKER_RUN_NAME", identity=False)

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> "TrackingConfig":
        """Select and fill the trackers. ConfigError on a bad symbol."""
        return bind(cls, values, trackers=TRACKERS.bind(values))

    def missing_packages(self) -> list[Problem]:
        """What has to be installed first."""
        return [_missing(t.package) for t in self.trackers if not _is_installed(t.package)]


def _is_installed(package: str) -> bool:
    # Its module would not do: a folder called wandb, which that tracker leaves behind, passes for one.
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _missing(package: str) -> Problem:
    what = f"TRACKER_{package.upper()}=y, but the package {package} is not installed"
    extras = "" if package in _IN_THE_DEFAULT_SET else f" EXTRAS={package}"
    return Problem(what, next=f"type: make setup{extras}")
