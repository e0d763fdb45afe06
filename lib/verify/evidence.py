"""What is known of one run: its own records, and what a tracker was told of it."""

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

# The tracker's configuration of a run, or why there is none.
Told = Mapping[str, Any] | str
Ask = Callable[[RunDir], Told]


@dataclass(frozen=True)
class Evidence:
    """A finished run."""

    run: RunDir
    facts: Facts
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    told: Told
    # Symbols in which it was declared to differ from the others.
    axis: Set[str]

    @property
    def name(self) -> str:
        """That of its directory."""
        return self.run.path.name

    def of(self, *place: str) -> Any:
        """What the manifest has there, or UNKNOWN."""
        return at(self.manifest, place)

    def figure(self, *place: str) -> Any:
        """What the summary has there, or UNKNOWN."""
        return at(self.summary, place)

    def setting(self, path: str) -> Any:
        """A setting of the identity, or UNKNOWN."""
        return self.facts.settings.get(path, UNKNOWN)

    def tracked(self, key: str) -> Any:
        """What the tracker has under ``key``, or UNKNOWN."""
        return UNKNOWN if isinstance(self.told, str) else self.told.get(key, UNKNOWN)


def read_evidence(run: RunDir, ask: Ask, axis: Set[str]) -> Evidence:
    """Read a run's records, and ask the tracker. ConfigError where a record cannot be read."""
    facts = read_facts(run)
    try:
        manifest, summary = (json.loads(path.read_text()) for path in (run.manifest, run.summary))
    except (OSError, ValueError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, str(run.path))) from None
    return Evidence(run, facts, manifest, summary, ask(run), axis)


def ask_record(run: RunDir) -> Told:
    """What all trackers of the run are told, from its own directory."""
    try:
        return LocalSource(run.path.parent).config(RunName("", run.path.name, "", run))
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{run.tracker_facts} cannot be read: {type(error).__name__}"


def ask_tracker(source: Source) -> Ask:
    """What ``source`` has of a run: by its project and name, where several have it by its id.

    A tracker that gives ids of its own knows the run by the digest of its manifest.
    """
    known: dict[str, list[RunName]] = {}

    def ask(run: RunDir) -> Told:
        try:
            facts = TrackerFacts.read(run.tracker_facts)
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"{run.tracker_facts} cannot be read: {type(error).__name__}"
        if facts.project not in known:
            known[facts.project] = list(source.names(facts.project))
        found = [one for one in known[facts.project] if one.name == facts.name]
        found = [one for one in found if one.id == facts.id] or found
        configs = [source.config(one) for one in found]
        if len(configs) > 1:
            digest = sha256(run.manifest)
            configs = [one for one in configs if one.get("manifest_sha256") == digest]
        if len(configs) == 1:
            return configs[0]
        number = f"{len(found) or 'no'} runs of {facts.project} in {source.place}"
        return f"{number} are called {facts.name}"

    return ask
