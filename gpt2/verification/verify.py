"""All rows of the checklist for some runs."""

from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from gpt2.comparison import symbol_names
from gpt2.planning import Plan
from gpt2.runs import read_resolved_config
from gpt2.verification.publish import said, to_publish
from gpt2.verification.training import KEYS, batch_remarks, length_remarks, seeds_row, stop_row
from lib.audit.contract import broken_contract
from lib.console import say
from lib.errors import ConfigError, Problem
from lib.files import sha256
from lib.queries.arguments import SOURCES, open_source
from lib.rundir import RunDir
from lib.verify.checklist import Checklist
from lib.verify.commit import commit_rows
from lib.verify.evidence import Ask, Evidence, ask_record, ask_tracker, read_evidence
from lib.verify.groups import LENGTH, SOFTWARE, group_rows, package_remarks
from lib.verify.rows import Remark, Row, Verdict, row
from lib.verify.settings import key_row, manifest_row, symbols_row


def tracker(plan: Plan, source: str, folder: Path | None, entity: str) -> Ask:
    """How to ask ``source`` for what it was told; ``folder`` is the results' where it is None.

    ConfigError where it is no source, PreflightError where it cannot be reached.
    """
    if source not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise ConfigError(Problem(f"{source!r} is no tracker's store; known: {known}", "SOURCE"))
    if source == "local":
        return ask_record
    entity = entity or plan.base.values["TRACKER_WANDB_ENTITY"]
    asked = Namespace(source=source, folder=folder, entity=entity)
    return ask_tracker(open_source(asked, plan.folder.parent))


def verify(
    runs: Sequence[RunDir], axes: Mapping[Path, Set[str]], ask: Ask, source: str
) -> Checklist:
    """Hold all ``runs`` to the first.

    ``axes`` has the symbols in which each was declared to differ, and ``ask`` gives what the
    tracker ``source`` has. ConfigError where a record cannot be read, PreflightError where the
    tracker cannot.
    """
    found = [read_evidence(run, ask, axes[run.path]) for run in runs]
    remarks = {
        LENGTH: [*length_remarks(found)],
        SOFTWARE: package_remarks(found),
        "effective batch": [*batch_remarks(found)],
    }
    rows = [
        stop_row(found),
        _records_row(found),
        manifest_row(found, lambda each: sha256(each.run.manifest)),
        *(key_row(key, found) for key in KEYS),
        symbols_row(found),
        *group_rows(found, _names(found), said(found), remarks),
        seeds_row(found),
        *commit_rows(found),
    ]
    names = [str(run.path) for run in runs]
    return Checklist(source, names, rows, to_publish(found, rows))


def _names(runs: Sequence[Evidence]) -> dict[str, str]:
    """Path of a setting → its symbol; those of a run that other code made stay paths."""
    names: dict[str, str] = {}
    for each in runs:
        try:
            names |= symbol_names(read_resolved_config(each.run))
        except ConfigError as error:
            say("WARN", f"{each.name}: {error.problems[0].what}")
    return names


def _records_row(runs: Sequence[Evidence]) -> Row:
    remarks = [
        Remark(Verdict.FAIL, f"{each.name}: {finding}", each.name)
        for each in runs
        for finding in broken_contract(each.run, every_byte=True)
    ]
    return row("records", "every file has its digest", remarks, "type: make audit RUN=NAME")
