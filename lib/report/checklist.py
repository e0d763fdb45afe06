"""Verification that finished runs can be published as a comparison, as a checklist.

The evidence of a run is its own files and its configuration in the tracker. Each row of the
checklist has a verdict; a fact that was not recorded is UNKNOWN and does not pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from lib.console import log
from lib.files import sha256_file
from lib.json_files import RecordError
from lib.report.render import json_document, markdown_table
from lib.report.run_facts import RunFacts, read_run_facts
from lib.runs.record import UNKNOWN
from lib.runs.run_dir import RunDir
from lib.tracking.sources import RunDirSource, RunRef, RunSource
from lib.tracking.tracker import TrackerMetadata as TrackerFacts
from lib.units import first_of

SCHEMA_VERSION = 1
_MAX_REASONS_SHOWN = 8
_MAX_VALUE_CHARS = 48


class CheckVerdict(StrEnum):
    """Verdict of a row. UNKNOWN, a fact that was not recorded, does not count as PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


class CheckRow(NamedTuple):
    """One check: verdict, explanation, affected runs and a command to run."""

    check: str
    verdict: CheckVerdict
    what: str
    runs: Sequence[str] = ()
    next: str = ""


class CheckRemark(NamedTuple):
    """A reason why a check does not pass, FAIL or UNKNOWN, and the run that causes it."""

    verdict: CheckVerdict
    what: str
    run: str = ""


def check_row(check: str, said: str, remarks: Iterable[CheckRemark], next: str = "") -> CheckRow:
    """Return a row: FAIL if any remark is FAIL, else UNKNOWN if any is, else PASS with ``said``."""
    causes = list(remarks)
    if not causes:
        return CheckRow(check, CheckVerdict.PASS, said)
    reasons = list(dict.fromkeys(remark.what for remark in causes))
    more = len(reasons) - _MAX_REASONS_SHOWN
    what = "; ".join(reasons[:_MAX_REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    runs = [run for run in dict.fromkeys(remark.run for remark in causes) if run]
    failed = any(remark.verdict is CheckVerdict.FAIL for remark in causes)
    return CheckRow(check, CheckVerdict.FAIL if failed else CheckVerdict.UNKNOWN, what, runs, next)


def values_by_run_text(values: Iterable[tuple[str, Any]]) -> str:
    """Return (run, value) pairs as ``2 (a, b), 4 (c)``; only the value if all runs share it."""
    grouped: dict[str, list[str]] = {}
    for run, value in values:
        grouped.setdefault(value_text(value), []).append(run)
    if len(grouped) == 1:
        return next(iter(grouped))
    return ", ".join(f"{value} ({first_of(runs)})" for value, runs in grouped.items())


def value_text(value: Any) -> str:
    """Return a value as text for one line."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


# A run's configuration from the tracker, or the reason that there is none.
TrackerConfig = Mapping[str, Any] | str
TrackerQuery = Callable[[RunDir], TrackerConfig]


@dataclass(frozen=True)
class RunEvidence:
    """Records of a finished run."""

    facts: RunFacts
    tracker_config: TrackerConfig
    # Symbols in which the run was declared to differ from the other runs.
    axis: Set[str]

    @property
    def run(self) -> RunDir:
        """Return the paths of the run."""
        return self.facts.run

    @property
    def name(self) -> str:
        """Return the name of the run directory."""
        return self.run.path.name

    def of(self, *place: str) -> Any:
        """Return the manifest value at the key path ``place``, or UNKNOWN."""
        return self.facts.record.manifest.find(*place)

    def figure(self, *place: str) -> Any:
        """Return the summary value at the key path ``place``, or UNKNOWN."""
        return self.facts.record.summary.find(*place)

    def setting(self, path: str) -> Any:
        """Return a setting of the identity, or UNKNOWN."""
        return self.facts.settings.get(path, UNKNOWN)

    def tracked(self, key: str) -> Any:
        """Return the tracker's value of ``key``, or UNKNOWN."""
        config = self.tracker_config
        return UNKNOWN if isinstance(config, str) else config.get(key, UNKNOWN)

    def fails(self, what: str) -> CheckRemark:
        """Return the reason why this run fails a check."""
        return CheckRemark(CheckVerdict.FAIL, what, self.name)

    def lacks(self, what: str) -> CheckRemark:
        """Return what is not known about this run."""
        return CheckRemark(CheckVerdict.UNKNOWN, what, self.name)

    def against_tracker(self, key: str, own: Any, differs: str) -> Iterator[CheckRemark]:
        """Yield a remark if the tracker's value of ``key`` or ``own`` is missing, or they differ."""
        config, tracked = self.tracker_config, self.tracked(key)
        if tracked == UNKNOWN:
            what = f"the tracker has no {key} for {self.name}"
            yield self.lacks(config if isinstance(config, str) else what)
        if own == UNKNOWN:
            yield self.lacks(f"the manifest of {self.name} has no {key}")
        elif tracked not in (UNKNOWN, own):
            yield self.fails(differs)


def read_evidence(run: RunDir, ask: TrackerQuery, axis: Set[str]) -> RunEvidence:
    """Read a run's records and query the tracker. Raises ConfigError if a record is unreadable."""
    facts = read_run_facts(run)
    # Read here, so that a damaged file is reported before the tracker is queried.
    _ = facts.record.summary
    return RunEvidence(facts, ask(run), axis)


def query_run_directory(run: RunDir) -> TrackerConfig:
    """Return the configuration sent to trackers, read from the run directory."""
    if not run.tracker_facts.exists():
        return f"{run.tracker_facts} does not exist"
    return RunDirSource(run.path.parent).config(RunRef("", run.path.name, "", run))


def tracker_query(source: RunSource) -> TrackerQuery:
    """Return a function that queries ``source`` for the configuration of a run.

    A run is identified by project and name, and by id if several runs share them. For trackers with
    ids of their own, the digest of the manifest identifies the run.
    """
    names: dict[str, list[RunRef]] = {}

    def query(run: RunDir) -> TrackerConfig:
        try:
            facts = TrackerFacts.read(run.tracker_facts)
        except RecordError as error:
            return f"{run.tracker_facts} cannot be read: {error.problems[0].what}"
        if facts.project not in names:
            names[facts.project] = list(source.names(facts.project))
        matches = [match for match in names[facts.project] if match.name == facts.name]
        matches = [match for match in matches if match.id == facts.id] or matches
        configs = [source.config(match) for match in matches]
        if len(configs) > 1:
            digest = sha256_file(run.manifest)
            configs = [config for config in configs if config.get("manifest_sha256") == digest]
        if len(configs) == 1:
            return configs[0]
        count = len(matches) or "no"
        return f"{count} runs of {facts.project} in {source.place} are named {facts.name}"

    return query


# Keys: ``source`` (the tracker), ``runs``, ``rows``, ``publish`` (name → text to publish; None if a
# row does not pass) and ``exit_code``.
Checklist = Mapping[str, Any]


def failing_rows(rows: Iterable[CheckRow]) -> list[CheckRow]:
    """Return the rows that do not pass."""
    return [row for row in rows if row.verdict is not CheckVerdict.PASS]


def checklist_to_markdown(checklist: Checklist) -> str:
    """Return the rows as a Markdown table; if all rows pass, also the texts to publish."""
    rows, publish = checklist["rows"], checklist["publish"]
    title = f"# Verification of {len(checklist['runs'])} run(s), tracker: {checklist['source']}"
    cells = [(row.check, row.verdict, row.what) for row in rows]
    table = markdown_table(("check", "verdict", "what"), cells, left=range(3))
    if publish is None:
        failing = f"{len(failing_rows(rows))} of {len(rows)}"
        return f"{title}\n\n{table}\nNot publishable: {failing} rows do not pass.\n"
    facts = markdown_table(("", ""), publish.items(), left=range(2))
    return f"{title}\n\n{table}\n## Publish with the results\n\n{facts}"


def checklist_to_json(checklist: Checklist) -> str:
    """Return the checklist as one JSON document."""
    rows = [row._asdict() for row in checklist["rows"]]
    return json_document(SCHEMA_VERSION, {**checklist, "rows": rows})


def log_failing(rows: Iterable[CheckRow]) -> None:
    """Log the reason of each row that does not pass, once, with the rows and a command to run."""
    by_reason: dict[tuple[CheckVerdict, str], list[CheckRow]] = {}
    for row in failing_rows(rows):
        by_reason.setdefault((row.verdict, row.what), []).append(row)
    for (verdict, what), same_reason in by_reason.items():
        names = ", ".join(row.check for row in same_reason)
        advice = next((row.next for row in same_reason if row.next), "")
        advice = advice and f"\n        {advice}"
        log("REFUSE" if verdict is CheckVerdict.FAIL else "UNKNOWN", f"{names}: {what}{advice}")
