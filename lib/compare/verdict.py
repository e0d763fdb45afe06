"""Verdict of comparing two runs: bitwise equal, diverged, compared, or not comparable."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from lib.compare.bitwise import Agreement, Divergence, compare_bytes
from lib.compare.facts import Facts
from lib.compare.keys import Difference, differences, speed_differences
from lib.compare.paired import PairedLoss, paired_loss
from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_COMPARABLE, ConfigError, Problem

SCHEMA_VERSION = 1
BITWISE = "BITWISE"
DIVERGED = "DIVERGED"
NOT_COMPARABLE = "NOT COMPARABLE"
# Two runs that differ only in the declared fields.
COMPARED = "COMPARED"
EXIT_CODES = {
    BITWISE: EXIT_DONE,
    COMPARED: EXIT_DONE,
    DIVERGED: EXIT_FAILED,
    NOT_COMPARABLE: EXIT_NOT_COMPARABLE,
}


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; A is the older run or the baseline."""

    a: str
    b: str
    verdict: str
    # Reasons why the runs are not comparable, one per field.
    reasons: Sequence[str] = ()
    # Differences declared as the axis of comparison, and differences declared as labels.
    axis: Sequence[str] = ()
    labels: Sequence[str] = ()
    same: Agreement | None = None
    first: Divergence | None = None
    losses: PairedLoss | None = None
    # Tokens per second of both runs, and the reasons why they are not comparable.
    speed: Sequence[float] = ()
    speed_reasons: Sequence[str] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """Return 0 if bitwise equal or compared, 1 if diverged, 4 if not comparable."""
        return EXIT_CODES[self.verdict]


def judge(
    a: Facts,
    b: Facts,
    names: Mapping[str, str],
    axis: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Comparison:
    """Compare two finished runs.

    Runs without differing fields must be bitwise equal. Every differing field must be listed in
    ``axis`` or ``labels``; ``names`` maps setting paths to the names to report. Raises ConfigError
    if ``axis`` or ``labels`` contains an unknown field.
    """
    for variable, fields in (("AXIS", axis), ("LABEL_BY", labels)):
        _check_fields(a, b, names, fields, variable)
    differing = differences(a, b, names)
    pair = str(a.run.path), str(b.run.path)
    if not differing:
        return same_bytes(a, b)
    declared = {*axis, *labels}
    off_axis = [str(d) for d in differing if d.field not in declared]
    if off_axis:
        return Comparison(*pair, NOT_COMPARABLE, reasons=off_axis)
    return Comparison(
        *pair,
        COMPARED,
        axis=[str(d) for d in differing if d.field not in labels],
        labels=[str(d) for d in differing if d.field in labels],
        losses=_losses(a, b, differing),
        speed=_speeds(a, b),
        speed_reasons=[str(d) for d in speed_differences(a, b)],
    )


def same_bytes(a: Facts, b: Facts, labels: Sequence[str] = ()) -> Comparison:
    """Return BITWISE, or DIVERGED at the first differing field, for runs that must be equal."""
    outcome = compare_bytes(a.run, b.run)
    pair = str(a.run.path), str(b.run.path)
    if isinstance(outcome, Agreement):
        return Comparison(*pair, BITWISE, labels=labels, same=outcome)
    return Comparison(*pair, DIVERGED, labels=labels, first=outcome)


def to_text(comparison: Comparison) -> str:
    """Return the comparison as text, verdict first."""
    lines = [comparison.verdict, f"  A  {comparison.a}", f"  B  {comparison.b}"]
    lines += [f"  differs    {reason}" for reason in comparison.reasons]
    lines += [f"  axis       {difference}" for difference in comparison.axis]
    lines += [f"  label      {difference}" for difference in comparison.labels]
    if comparison.same is not None:
        lines.append(f"  the same   {comparison.same}")
    if comparison.first is not None:
        lines.append(f"  first      {comparison.first}")
    if comparison.losses is not None:
        lines += _loss_lines(comparison.losses)
    elif comparison.verdict == COMPARED:
        lines.append("  losses     not comparable: evaluated on different documents")
    if comparison.speed_reasons:
        lines += [f"  speed      not comparable: {reason}" for reason in comparison.speed_reasons]
    elif comparison.speed:
        lines.append(
            "  speed      A {:,.0f}, B {:,.0f} tokens per second".format(*comparison.speed)
        )
    return "\n".join(lines) + "\n"


def to_json(comparison: Comparison) -> str:
    """Return the comparison as one JSON document with sorted keys."""
    document = {
        "schema_version": SCHEMA_VERSION,
        **asdict(comparison),
        "exit_code": comparison.exit_code,
    }
    if comparison.losses is not None:
        document["losses"]["difference"] = comparison.losses.difference
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False, default=str) + "\n"


def _check_fields(
    a: Facts, b: Facts, names: Mapping[str, str], fields: Sequence[str], variable: str
) -> None:
    valid = {*names.values(), "code"}
    for facts in (a, b):
        valid |= {*facts.observed, *facts.settings, *facts.symbols}
    problems = [
        Problem(
            f"unknown field {name!r} (expected a symbol or field of these runs)",
            variable,
            code="usage.unknown-field",
        )
        for name in fields
        if name not in valid
    ]
    if problems:
        raise ConfigError(*problems)


def _losses(a: Facts, b: Facts, differing: Sequence[Difference]) -> PairedLoss | None:
    """Return the paired losses; None if the runs were evaluated on different tokens."""
    if {"documents", "data", "tokenizer"} & {d.field for d in differing}:
        return None
    return paired_loss(a.run, b.run)


def _speeds(a: Facts, b: Facts) -> list[float]:
    return [
        float(json.loads(facts.run.summary.read_text())["timing"]["tokens_per_second"])
        for facts in (a, b)
    ]


def _loss_lines(losses: PairedLoss) -> list[str]:
    spread = "" if losses.sd is None else f", sd {losses.sd:.4f}"
    p = "" if losses.sign_test_p is None else f"; sign test p={losses.sign_test_p:.2g}"
    share = losses.better / losses.documents
    return [
        f"  loss       A {losses.loss_a:.4f}, B {losses.loss_b:.4f}: {losses.difference:+.4f} nats "
        "per token",
        f"  documents  {losses.documents}: mean {losses.mean:+.4f}{spread}; B better on "
        f"{losses.better} ({share:.0%}), equal on {losses.equal}{p}",
        "  one seed each: the spread is over documents, not over seeds",
    ]
