"""Split results into groups that can be compared, and flag results that cannot.

A result is comparable with the baseline if the two runs differ only in planned settings. Any other
result is reported as a hole, or put into a separate part if the user names the differing fields as
labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.analysis.results import Hole, Result
from lib.compare.facts import code_digest
from lib.compare.keys import observed_differences
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Part:
    """Results that can be compared with each other, and the holes listed beside them."""

    # Field → value shared by all results of the part; empty without labels.
    labels: Mapping[str, str]
    items: Sequence[Result | Hole]


def parts(
    items: Sequence[Result | Hole], baseline: str, label_by: Sequence[str] = ()
) -> list[Part]:
    """Return one part, or one part per combination of label values.

    A result that differs in an observed fact or in code from its part's first result of the variant
    ``baseline`` becomes a hole with the reason. Runs without a result are listed in the first part.
    Raises ConfigError if ``label_by`` contains an unknown field.
    """
    results = [item for item in items if isinstance(item, Result)]
    grouped: dict[tuple[str, ...], list[Result | Hole]] = {}
    for item, label in zip(results, _labels(results, label_by), strict=True):
        grouped.setdefault(label, []).append(item)
    holes = [item for item in items if isinstance(item, Hole)]
    if not grouped:
        return [Part({}, holes)]
    return [
        Part(
            dict(zip(label_by, label, strict=True)),
            [*_checked(items, baseline), *(holes if number == 0 else [])],
        )
        for number, (label, items) in enumerate(grouped.items())
    ]


def _checked(results: Sequence[Any], baseline: str) -> list[Result | Hole]:
    reference = next((r for r in results if r.run.variant.slug == baseline), results[0])
    return [_against(reference, item) for item in results]


def _against(reference: Result, result: Result) -> Result | Hole:
    mismatches = observed_differences(reference.facts, result.facts)
    if not mismatches:
        return result
    fields = ", ".join(difference.field for difference in mismatches)
    reason = f"against {reference.run.label}: " + "; ".join(map(str, mismatches))
    return Hole(result.run, f"not comparable: {fields}", reason)


def _labels(results: Sequence[Result], label_by: Sequence[str]) -> list[tuple[str, ...]]:
    if not results:
        return []
    shared = set.intersection(*(set(r.facts.sources) for r in results))
    labels: list[tuple[str, ...]] = []
    for result in results:
        try:
            labels.append(
                tuple(
                    (
                        code_digest(result.facts.sources, sorted(shared))
                        if field == "code"
                        else str(result.facts.value(field))
                    )
                    for field in label_by
                )
            )
        except KeyError as error:
            known = f"a symbol or field of {result.run.label}"
            what = f"unknown field {error.args[0]!r} (expected {known})"
            raise ConfigError(Problem(what, "LABEL_BY", code="usage.unknown-field")) from None
    return labels
