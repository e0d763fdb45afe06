"""Which results may stand in one table: those that differ from the baseline as planned, and in
nothing else. The rest is named, or kept apart under a label that the user asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.analysis.results import Hole, Result
from lib.compare.facts import code_digest
from lib.compare.keys import observed_differences
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Part:
    """Results that may be compared with each other, and the holes beside them."""

    # Field → the value that all of them share; empty without labels.
    labels: Mapping[str, str]
    items: Sequence[Result | Hole]


def parts(
    found: Sequence[Result | Hole], baseline: str, label_by: Sequence[str] = ()
) -> list[Part]:
    """One part, or one for each combination of the labels' values.

    A result that differs from its part's first result of the variant ``baseline`` in what was
    observed, or in code, is a hole that says so. Runs without a result stand in the first part.
    ConfigError where ``label_by`` names no field.
    """
    results = [item for item in found if isinstance(item, Result)]
    grouped: dict[tuple[str, ...], list[Result | Hole]] = {}
    for item, label in zip(results, _labels(results, label_by), strict=True):
        grouped.setdefault(label, []).append(item)
    holes = [item for item in found if isinstance(item, Hole)]
    if not grouped:
        return [Part({}, holes)]
    return [
        Part(
            dict(zip(label_by, label, strict=True)),
            [*_checked(items, baseline), *(holes if number == 0 else [])],
        )
        for number, (label, items) in enumerate(grouped.items())
    ]


def _checked(items: Sequence[Any], baseline: str) -> list[Result | Hole]:
    reference = next((r for r in items if r.run.variant.slug == baseline), items[0])
    return [_against(reference, item) for item in items]


def _against(reference: Result, item: Result) -> Result | Hole:
    others = observed_differences(reference.facts, item.facts)
    if not others:
        return item
    fields = ", ".join(difference.field for difference in others)
    reason = f"against {reference.run.label}: " + "; ".join(map(str, others))
    return Hole(item.run, f"not comparable: {fields}", reason)


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
            what = f"{error.args[0]!r} is neither a symbol nor a field of {result.run.label}"
            raise ConfigError(Problem(what, "LABEL_BY")) from None
    return labels
