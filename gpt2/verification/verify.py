"""The checklist of ``make verify-results``: assembly of all rows for a set of runs."""

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
    """Return a function that queries ``source`` for the tracked settings of a run.

    ``folder`` defaults to the results folder. Raises ConfigError if ``source`` is unknown,
    PreflightError if it cannot be reached.
    """
    if source not in SOURCES:
        what = f"unknown source {source!r} (expected {', '.join(sorted(SOURCES))})"
        raise ConfigError(Problem(what, "SOURCE", code="usage.unknown-value"))
    if source == "local":
        return ask_record
    entity = entity or plan.base.values["TRACKER_WANDB_ENTITY"]
    args = Namespace(source=source, folder=folder, entity=entity)
    return ask_tracker(open_source(args, plan.folder.parent))


def verify(
    runs: Sequence[RunDir], axes: Mapping[Path, Set[str]], ask: Ask, source: str
) -> Checklist:
    """Compare all ``runs`` with the first one and return the checklist.

    ``axes`` maps each run to the symbols in which it may differ; ``ask`` returns the settings stored
    by the tracker ``source``. Raises ConfigError if a record cannot be read, PreflightError if the
    tracker cannot be read.
    """
    evidence = [read_evidence(run, ask, axes[run.path]) for run in runs]
    remarks = {
        LENGTH: [*length_remarks(evidence)],
        SOFTWARE: package_remarks(evidence),
        "effective batch": [*batch_remarks(evidence)],
    }
    rows = [
        stop_row(evidence),
        _records_row(evidence),
        manifest_row(evidence, lambda each: sha256(each.run.manifest)),
        *(key_row(key, evidence) for key in KEYS),
        symbols_row(evidence),
        *group_rows(evidence, _names(evidence), said(evidence), remarks),
        seeds_row(evidence),
        *commit_rows(evidence),
    ]
    names = [str(run.path) for run in runs]
    return Checklist(source, names, rows, to_publish(evidence, rows))


def _names(runs: Sequence[Evidence]) -> dict[str, str]:
    """Return {setting path: symbol}; settings of runs made by other code keep their paths."""
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
    return row("records", "all file digests match", remarks, "type: make audit RUN=NAME")
