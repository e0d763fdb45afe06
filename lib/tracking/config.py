"""The trackers of a run, its project and its name. Imports no tracker library."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lib.config.field import SymbolValue, from_symbols, kconfig_field
from lib.errors import Problem
from lib.tracking.options import TRACKERS, TrackerOptions

# All other packages are extras of pyproject.toml.
_DEFAULT_PACKAGES = {"wandb"}


@dataclass(frozen=True)
class TrackingConfig:
    """Any number of trackers; none of these settings can change a run's result."""

    # Options of each tracker.
    trackers: tuple[TrackerOptions, ...]
    # "" selects a name derived from the study and the run directory.
    project: str = kconfig_field("TRACKER_PROJECT", identity=False)
    run_name: str = kconfig_field("TRACKER_RUN_NAME", identity=False)

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "TrackingConfig":
        """Select the trackers and fill in their options. Raises ConfigError for an invalid symbol."""
        return from_symbols(cls, values, trackers=TRACKERS.bind(values))

    def missing_packages(self) -> list[Problem]:
        """Return a problem for each tracker package that is not installed."""
        return [_missing(t.package) for t in self.trackers if not _is_installed(t.package)]


def _is_installed(package: str) -> bool:
    # Checking for the module is not enough: wandb leaves a folder of that name behind.
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _missing(package: str) -> Problem:
    what = f"TRACKER_{package.upper()}=y, but the package {package} is not installed"
    extras = "" if package in _DEFAULT_PACKAGES else f" EXTRAS={package}"
    return Problem(what, next=f"type: make setup{extras}", code="env.missing-package")
