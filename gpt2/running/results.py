"""The results of a plan's runs: what reports and verdicts write beside the runs, and print."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from gpt2.records.listing import other_configurations
from gpt2.running.backend import Gpt2Backend
from gpt2.running.studies_index import write_index
from gpt2.study.document import study_document_of
from gpt2.study.plan import Plan, declared_verdicts
from lib.console import is_verbose, log, terminal_columns
from lib.report.columns import to_json, to_markdown, to_terminal, training_text, write_tables
from lib.report.page import REPORT_FILE, write_report
from lib.report.plots import study_series
from lib.report.study import JudgedStudy, read_study
from lib.report.text import Document


@dataclass(frozen=True)
class StudyResults:
    """The runs of a plan, read and judged, and the document that is made from them."""

    plan: Plan
    study: JudgedStudy

    @cached_property
    def document(self) -> Document:
        return study_document_of(self.plan, self.study)

    def of(self, plan: Plan) -> "StudyResults":
        """Return the part with the runs of ``plan``, judged among all."""
        return StudyResults(plan, self.study.of_runs({run.path for run in plan.runs}))

    def publish(self) -> None:
        """Write report and index."""
        write_report(self.document, study_series(self.study), self.plan.folder)
        log("INDEX", str(write_index(self.plan, self.document, judged_document)))

    def text(self, *, json: bool) -> str:
        """Return the document as JSON, or as text with the files below the table."""
        if json:
            log("REPORT", str(self.plan.folder / REPORT_FILE))
            return to_json(self.document)
        return results_text(self.document, self.study, self.plan.folder)


def results_text(document: Document, study: JudgedStudy, folder: Path) -> str:
    """Return the table for a terminal, or as Markdown, and the files in ``folder`` below it."""
    files = f"Report: {folder / REPORT_FILE}\n"
    runs = [outcome.record.run for outcome in study.listed]
    if len(runs) == 1 and runs[0].sample.exists():
        files += f"Sample: {runs[0].sample}\n"
    columns = terminal_columns(sys.stdout)
    if columns is None or is_verbose():
        return f"{to_markdown(document)}\n{files}"
    text = to_terminal(document, columns)
    if len(runs) == 1:
        text += "".join(training_text(series, columns) for series in study_series(study))
    return f"{text}{files}V=1 shows p, the rule, remarks, and all columns and sections\n"


def write_results(plan: Plan, label_by: Sequence[str] = (), *, looks: bool = True) -> StudyResults:
    """Return the results of all runs of the study; write document and tables."""
    results = read_results(plan, label_by, looks=looks)
    if others := other_configurations(plan):
        results.document["sections"].append(asdict(others))
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in write_tables(results.document, plan.folder):
        log("TABLE", str(path))
    return results


def read_results(plan: Plan, label_by: Sequence[str] = (), *, looks: bool = False) -> StudyResults:
    """Return the plan's runs, read and judged.

    Without ``looks``, the verdicts are those at the looks declared so far.
    """
    declared = replace(declared_verdicts(plan), exploratory=not looks)
    is_stale = Gpt2Backend(plan).drift
    return StudyResults(plan, read_study(plan.study, plan.runs, declared, label_by, is_stale))


def judged_document(plan: Plan) -> Document:
    """Return the document of the plan's runs at the looks declared so far; writes nothing."""
    return read_results(plan).document
