"""Records of one run for verification: the run's own files and its tracker's configuration."""

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from lib.compare.facts import UNKNOWN, Facts, at, read_facts
from lib.errors import ConfigError, Problem
from lib.files import sha256
from lib.queries.contract import RunName, Source
from lib.queries.local import LocalSource
from lib.rundir import RunDir
from lib.tracking.contract import Facts as TrackerFacts

# A run's configuration from the tracker, or the reason that there is none.
Told = Mapping[str, Any] | str
Ask = Callable[[RunDir], Told]


@dataclass(frozen=True)
class Evidence:
    """Records of a finished run."""

    run: RunDir
    facts: Facts
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    told: Told
    # Symbols in which the run was declared to differ from the other runs.
    axis: Set[str]

    @property
    def name(self) -> str:
        """Return the name of the run directory."""
        return self.run.path.name

    def of(self, *place: str) -> Any:
        """Return the manifest value at the key path ``place``, or UNKNOWN."""
        return at(self.manifest, place)

    def figure(self, *place: str) -> Any:
        """Return the summary value at the key path ``place``, or UNKNOWN."""
        return at(self.summary, place)

    def setting(self, path: str) -> Any:
        """Return a setting of the identity, or UNKNOWN."""
        return self.facts.settings.get(path, UNKNOWN)

    def tracked(self, key: str) -> Any:
        """Return the tracker's value of ``key``, or UNKNOWN."""
        return UNKNOWN if isinstance(self.told, str) else self.told.get(key, UNKNOWN)


def read_evidence(run: RunDir, ask: Ask, axis: Set[str]) -> Evidence:
    """Read a run's records and query the tracker. Raises ConfigError if a record is unreadable."""
    facts = read_facts(run)
    try:
        manifest, summary = (json.loads(path.read_text()) for path in (run.manifest, run.summary))
    except (OSError, ValueError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, str(run.path), code="run.damaged")) from None
    return Evidence(run, facts, manifest, summary, ask(run), axis)


def ask_record(run: RunDir) -> Told:
    """Return the configuration sent to trackers, read from the run directory."""
    try:
        return LocalSource(run.path.parent).config(RunName("", run.path.name, "", run))
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{run.tracker_facts} cannot be read: {type(error).__name__}"


def ask_tracker(source: Source) -> Ask:
    """Return a function that queries ``source`` for the configuration of a run.

    A run is identified by project and name, and by id if several runs share them. For trackers with
    ids of their own, the digest of the manifest identifies the run.
    """
    names: dict[str, list[RunName]] = {}

    def query(run: RunDir) -> Told:
        try:
            facts = TrackerFacts.read(run.tracker_facts)
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"{run.tracker_facts} cannot be read: {type(error).__name__}"
        if facts.project not in names:
            names[facts.project] = list(source.names(facts.project))
        matches = [match for match in names[facts.project] if match.name == facts.name]
        matches = [match for match in matches if match.id == facts.id] or matches
        configs = [source.config(match) for match in matches]
        if len(configs) > 1:
            digest = sha256(run.manifest)
            configs = [config for config in configs if config.get("manifest_sha256") == digest]
        if len(configs) == 1:
            return configs[0]
        count = len(matches) or "no"
        return f"{count} runs of {facts.project} in {source.place} are named {facts.name}"

    return query
