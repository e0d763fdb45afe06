"""Comparisons and documents of fabricated studies."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lib.report.contrasts import Contrast, contrasts_of
from lib.report.study import study_document
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import ResultTable
from lib.runs.run import RunVariant

CONTEXT: dict[str, Any] = {
    "title": "Study demo",
    "question": ["Does it help?"],
    "flops": {"baseline": 6.0e6},
    "settings": [],
    "commands": [("make report", "this report again")],
}


def family_of(parents: Mapping[str, str], against: str = "both") -> list[Contrast]:
    """Return the comparisons of variants, each with its parent, the baseline first."""
    return contrasts_of(
        [RunVariant(slug, parent=parent) for slug, parent in parents.items()], against
    )


def document_of(results: ResultTable | StudyVerdicts) -> dict[str, Any]:
    """Return the document of a table, or of verdicts without one; a test may change it."""
    if isinstance(results, StudyVerdicts):
        results = ResultTable("demo", verdicts=results)
    return deepcopy(study_document(results, CONTEXT))


def verdict_of(study: StudyVerdicts, name: str) -> dict[str, Any]:
    """Return the verdict with a name, as in the document."""
    return next(v for v in document_of(study)["verdicts"] if v["name"] == name)
