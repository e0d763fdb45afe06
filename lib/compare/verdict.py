"""What comparing two runs came to: the same bytes, apart at one place, a difference, or refused."""

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
# Two runs that were meant to differ, and do in that alone.
COMPARED = "COMPARED"
EXIT_CODES = {
    BITWISE: EXIT_DONE,
    COMPARED: EXIT_DONE,
    DIVERGED: EXIT_FAILED,
    NOT_COMPARABLE: EXIT_NOT_COMPARABLE,
}


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; A is the older or the baseline."""

    a: str
    b: str
    verdict: str
    # Why they are not comparable, one field each.
    reasons: Sequence[str] = ()
    # What was to differ, and what the user names as a label.
    axis: Sequence[str] = ()
    labels: Sequence[str] = ()
    same: Agreement | None = None
    first: Divergence | None = None
    losses: PairedLoss | None = None
    # Tokens per second, or what keeps them from being compared.
    speed: Sequence[float] = ()
    speed_reasons: Sequence[str] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """0 the same or compared, 1 diverged, 4 not comparable."""
        return EXIT_CODES[self.verdict]


def judge(
    a: Facts,
    b: Facts,
    names: Mapping[str, str],
    axis: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Comparison:
    """Compare two finished runs.

    With nothing between them they have to be the same bytes. What differs must stand in ``axis`` or
    in ``labels``; ``names`` calls settings by another name than their path. ConfigError where one
    of these is no field.
    """
    for variable, fields in (("AXIS", axis), ("LABEL_BY", labels)):
        _known(a, b, names, fields, variable)
    found = differences(a, b, names)
    pair = str(a.run.path), str(b.run.path)
    if not found:
        return same_bytes(a, b)
    named = {*axis, *labels}
    off_axis = [str(d) for d in found if d.field not in named]
    if off_axis:
        return Comparison(*pair, NOT_COMPARABLE, reasons=off_axis)
    return Comparison(
        *pair,
        COMPARED,
        axis=[str(d) for d in found if d.field not in labels],
        labels=[str(d) for d in found if d.field in labels],
        losses=_losses(a, b, found),
        speed=_speeds(a, b),
        speed_reasons=[str(d) for d in speed_differences(a, b)],
    )


def same_bytes(a: Facts, b: Facts, labels: Sequence[str] = ()) -> Comparison:
    """BITWISE, or DIVERGED at the first field; whoever calls has settled that they should agree."""
    found = compare_bytes(a.run, b.run)
    pair = str(a.run.path), str(b.run.path)
    if isinstance(found, Agreement):
        return Comparison(*pair, BITWISE, labels=labels, same=found)
    return Comparison(*pair, DIVERGED, labels=labels, first=found)


def to_text(found: Comparison) -> str:
    """The verdict first, then what it rests on."""
    lines = [found.verdict, f"  A  {found.a}", f"  B  {found.b}"]
    lines += [f"  differs    {reason}" for reason in found.reasons]
    lines += [f"  axis       {difference}" for difference in found.axis]
    lines += [f"  label      {difference}" for difference in found.labels]
    if found.same is not None:
        lines.append(f"  the same   {found.same}")
    if found.first is not None:
        lines.append(f"  first      {found.first}")
    if found.losses is not None:
        lines += _loss_lines(found.losses)
    elif found.verdict == COMPARED:
        lines.append("  losses     judged on other documents: no difference can be told")
    if found.speed_reasons:
        lines += [f"  speed      not comparable: {reason}" for reason in found.speed_reasons]
    elif found.speed:
        lines.append("  speed      A {:,.0f}, B {:,.0f} tokens per second".format(*found.speed))
    return "\n".join(lines) + "\n"


def to_json(found: Comparison) -> str:
    """One document with sorted keys."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(found), "exit_code": found.exit_code}
    if found.losses is not None:
        document["losses"]["difference"] = found.losses.difference
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False, default=str) + "\n"


def _known(
    a: Facts, b: Facts, names: Mapping[str, str], fields: Sequence[str], variable: str
) -> None:
    known = {*names.values(), "code"}
    for facts in (a, b):
        known |= {*facts.observed, *facts.settings, *facts.symbols}
    problems = [
        Problem(f"{name!r} is neither a symbol nor a field of these runs", variable)
        for name in fields
        if name not in known
    ]
    if problems:
        raise ConfigError(*problems)


def _losses(a: Facts, b: Facts, found: Sequence[Difference]) -> PairedLoss | None:
    """None where they were not judged on the same tokens."""
    if {"documents", "data", "tokenizer"} & {d.field for d in found}:
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
        "  one seed each: the spread is over documents, not over trainings",
    ]
