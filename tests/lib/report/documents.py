"""Comparisons and documents of fabricated studies."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lib.report.contrasts import Contrast, contrasts_of
from lib.report.declarations import VerdictPlan
from lib.report.study import JudgedStudy, study_document
from lib.runs.run import RunVariant

# The part of a document that a plan determines.
CONTEXT: Mapping[str, Any] = {
    "title": "Study demo",
    "question": ["Does it help?"],
    "flops": {"baseline": 6.0e6},
    "settings": [],
    "commands": [["make report", "this report again"]],
    "more_seeds": "make SEEDS=1-3",
    "left_out": [],
    "sections": [],
}


def family_of(parents: Mapping[str, str], against: str = "both") -> list[Contrast]:
    """Return the comparisons of variants, each with its parent, the baseline first."""
    return contrasts_of(
        [RunVariant(slug, parent=parent) for slug, parent in parents.items()], against
    )


def document_of(study: JudgedStudy | Mapping[str, Any], **context: Any) -> dict[str, Any]:
    """Return the document of a study, or of verdicts without runs; a test may change it."""
    if not isinstance(study, JudgedStudy):
        study = JudgedStudy("demo", study.get("plan", VerdictPlan()), [], {}, study)
    document = study_document(study) | CONTEXT | context
    flops = document.pop("flops")
    for row in document["rows"]:
        row["flops_per_token"] = flops.get(row["slug"])
    return deepcopy(document)
