"""Documents of fabricated studies."""

from copy import deepcopy
from typing import Any

from lib.report.study import study_document
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import ResultTable

CONTEXT: dict[str, Any] = {
    "title": "Study demo",
    "question": ["Does it help?"],
    "flops": {"baseline": 6.0e6},
    "settings": [],
    "commands": [("make report", "this report again")],
    "other_folders": [],
}


def document_of(results: ResultTable | StudyVerdicts) -> dict[str, Any]:
    """Return the document of a table, or of verdicts without one; a test may change it."""
    if isinstance(results, StudyVerdicts):
        results = ResultTable("demo", verdicts=results)
    return deepcopy(study_document(results, CONTEXT))


def verdict_of(study: StudyVerdicts, name: str) -> dict[str, Any]:
    """Return the verdict with a name, as in the document."""
    return next(v for v in document_of(study)["verdicts"] if v["name"] == name)
