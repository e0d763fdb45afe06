"""Declarations of a study: rule, family, planned looks, and each look that was taken, but no word.

The error rate rests on them. They are the lines of one file beside the runs, appended before a run
starts or a look is judged; a line concerns the studies with which it has a run in common.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from lib.errors import ConfigError
from lib.files import canonical_json, file_lock, fsync_directory, naming, no_follow
from lib.json_files import (
    MissingRecord,
    RecordError,
    parse_json_line,
    read_json_object,
    read_record,
)
from lib.report.contrasts import CONTROL_ROLES, Contrast
from lib.report.options import MIN_SEEDS, NATS, LookPlan, sum_of_shares
from lib.report.statistics import VerdictRule

DECLARATIONS_FILE = "declarations.jsonl"
# Written by earlier versions of this program, with words; imported once, without them.
_FORMER_FILE, _FORMER_SCHEMA = "verdicts.json", 3
T = TypeVar("T")
_ADVICE = "move it aside: its looks then no longer count, and the report says so"
_MAX_BYTES = 1 << 26

# Name of a comparison → arm → digest of its configuration without the seed, "" if unknown.
Family = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class DeclaredPlan:
    """What a study declared before its runs: rule, planned looks, seeds, and comparisons."""

    rule: Mapping[str, Any]
    look_plan: LookPlan
    seeds: tuple[int, ...]
    family: Family
    # Seconds since the epoch.
    at: float = 0.0
    imported: bool = False


@dataclass(frozen=True)
class Look:
    """A look that was taken: the study judged after ``n`` complete blocks."""

    number: int
    n: int
    share: float
    # False if the share came out of the reserve.
    planned: bool
    # Seeds of the blocks.
    seeds: tuple[int, ...] = ()
    # Whether only comparisons were judged that were added after the look before, at the same seeds.
    added: bool = False
    family: Family = field(default_factory=dict)
    # Comparisons whose runs had ended → seconds since the epoch.
    judged: Mapping[str, float] = field(default_factory=dict)
    # Digest of the evaluation documents; "" if unknown.
    evaluation_set: str = ""
    at: float = 0.0
    imported: bool = False


Line = DeclaredPlan | Look


@dataclass(frozen=True)
class VerdictPlan:
    """What a study declares now: rule, looks, comparisons; and the lines of its folder."""

    rule: VerdictRule = field(default_factory=VerdictRule)
    # both, baseline or parent
    against: str = "both"
    # Of a factorial design, whose effects are compared instead of its runs: whether the two-way
    # interactions are, too. None for another design.
    interactions: bool | None = None
    # Planned looks; by default one, at all of alpha.
    looks: LookPlan = field(default=LookPlan((MIN_SEEDS,), (1.0,)))
    # Seeds of the next look; all that have a run if empty.
    seeds: tuple[int, ...] = ()
    # Comparisons of the configured study, those of its A/A steps and repeats included.
    declared: Sequence[Contrast] = ()
    # Arm → digest of its configuration without the seed.
    configurations: Mapping[str, str] = field(default_factory=dict)
    declarations: tuple[Line, ...] = ()
    # None if nothing is written.
    folder: Path | None = None
    # Whether no look is taken, such as for rows that are split by labels.
    exploratory: bool = False
    # The look that was declared for these verdicts; None if none was due.
    taken: Look | None = None
    # Whether verdicts are given; a study of speed has none.
    judged: bool = True
    # Of losses and differences.
    unit: str = NATS

    @property
    def rule_record(self) -> dict[str, Any]:
        rule = {**asdict(self.rule), "against": self.against}
        if self.interactions is not None:
            rule |= {"interactions": self.interactions}
        return rule | ({"unit": self.unit} if self.unit != NATS else {})

    @property
    def contrasts(self) -> dict[str, Contrast]:
        return {c.name: c for c in self.declared if c.role not in CONTROL_ROLES}


# Lines.


def plans_of(lines: Iterable[Line]) -> list[DeclaredPlan]:
    return [line for line in lines if isinstance(line, DeclaredPlan)]


def looks_of(lines: Iterable[Line]) -> list[Look]:
    """Return each look once, numbered from 1; one without alpha left cannot give a word."""
    looks: dict[Any, Look] = {}
    for line in lines:
        if isinstance(line, Look):
            key = (line.seeds, line.added and tuple(sorted(line.family)))
            first = looks.setdefault(key, line)
            looks[key] = replace(first, judged={**line.judged, **first.judged})
    counted: list[Look] = []
    for look in looks.values():
        if sum_of_shares([*(each.share for each in counted), look.share]) <= 1:
            counted.append(replace(look, number=len(counted) + 1))
    return counted


def concerning(lines: Iterable[Line], arms: Mapping[str, str]) -> list[Line]:
    """Return the lines with a run of ``arms``, by name and configuration without the seed."""

    def has_run(family: Family) -> bool:
        runs = (run for each in family.values() for run in each.items())
        return any(arm in arms and _same_digest(digest, arms[arm]) for arm, digest in runs)

    return [line for line in lines if has_run(line.family)]


def _same_digest(one: str, other: str) -> bool:
    return one == other or not one or not other


def is_declared(name: str, arms: Mapping[str, str], family: Family) -> bool:
    """Return whether ``family`` has the comparison ``name`` of these arms and configurations."""
    known = family.get(name)
    if known is None or known.keys() != arms.keys():
        return False
    return all(_same_digest(digest, arms[arm]) for arm, digest in known.items())


def family_size(families: Iterable[Family]) -> int:
    """Return the number of different comparisons: of other arms or configurations is another one."""
    known: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for family in families:
        for name, arms in family.items():
            digests = known.setdefault((name, *sorted(arms)), set())
            if all(arms.values()):
                digests.add(tuple(arms[arm] for arm in sorted(arms)))
    return sum(max(1, len(digests)) for digests in known.values())


# Looks. Each tests the undecided comparisons at its share of alpha. The shares sum to at most 1, so the
# probability of a false word stays below alpha at any number of looks (union bound; the plain form of
# the group-sequential procedures in Tamhane et al. 2021). What the planned looks leave is the reserve:
# each unplanned look takes half of the rest.


def judged_seeds(looks: Sequence[Look]) -> int:
    return max((look.n for look in looks), default=0)


def reserve_share(plan: LookPlan, looks: Sequence[Look]) -> float:
    """Return the share of an unplanned look after ``looks``: half of the rest of the reserve."""
    unplanned = [look.share for look in looks if not look.planned]
    planned = [look.share for look in looks if look.planned]
    # Looks of several studies that were joined may have planned more than one plan.
    left = 1 - max(map(sum_of_shares, (plan.shares, planned))) - sum_of_shares(unplanned)
    return float(max(Decimal(0), left / 2))


def due_look(plan: LookPlan, looks: Sequence[Look], n: int) -> Look | None:
    """Return the look to take after ``n`` blocks; None if none is due, or no alpha is left."""
    judged, number = judged_seeds(looks), len(looks) + 1
    if n <= judged:
        return None
    waiting = [(s, share) for s, share in zip(plan.seeds, plan.shares, strict=True) if s > judged]
    if not waiting:
        share = reserve_share(plan, looks)
        return Look(number, n, share, planned=False) if share else None
    # The share of a skipped planned look is lost.
    shares = [share for seeds, share in waiting if seeds <= n]
    return Look(number, n, shares[-1], planned=True) if shares else None


def share_at(plan: LookPlan, looks: Sequence[Look], n: int) -> float:
    """Return the share of the look that decides about ``n`` seeds, if it is the next one."""
    judged = judged_seeds(looks)
    spending = zip(plan.seeds, plan.shares, strict=True)
    coming = (share for seeds, share in spending if seeds > judged and seeds >= n)
    return next(coming, None) or reserve_share(plan, looks)


# The file.


def read_declarations(folder: Path) -> tuple[Line, ...]:
    """Return the declarations of the studies in ``folder``; those of a former record if none.

    A part of a line that a crash left declares nothing. Raises ConfigError with the line that is
    damaged: it may be a look, which must not be forgotten.
    """
    path, former = folder / DECLARATIONS_FILE, folder / _FORMER_FILE
    content = b""
    with _refusing(path, "a file of declarations"), suppress(MissingRecord):
        content = read_record(path, "one JSON object per line", _MAX_BYTES)
    if not content:
        with _refusing(former, "a record of verdicts"):
            return tuple(_former(former))
    lines = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        with _refusing(path, "a plan or a look", number):
            lines.append(_line(parse_json_line(path, number, text)))
    return tuple(lines)


@contextmanager
def _refusing(path: Path, expected: str, line: int = 0) -> Iterator[None]:
    try:
        yield
    except (RecordError, LookupError, TypeError, ValueError, AttributeError) as error:
        if not isinstance(error, RecordError):
            text = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            error = RecordError(path, expected, text[:200], line)
        problems = (replace(problem, next=_ADVICE) for problem in error.problems)
        raise ConfigError(*problems) from None


def append_declarations(
    folder: Path, missing: Callable[[Sequence[Line]], Sequence[Line]]
) -> tuple[Line, ...]:
    """Append the declarations that ``missing`` returns for the present ones; return all of them.

    Other processes wait meanwhile. A part of a line that a crash left is removed. Raises ConfigError
    if the file is damaged, RunError if it is a link.
    """
    known = read_declarations(folder)
    if not missing(known):
        return known
    path = folder / DECLARATIONS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    with naming(path), file_lock(path):
        known = read_declarations(folder)
        new = tuple(missing(known))
        # The imported ones are not in the file yet.
        lines = new if path.stat().st_size else (*known, *new)
        text = "".join(canonical_json(line_record(line)) + "\n" for line in lines if new)
        with open(no_follow(path, os.O_RDWR | os.O_APPEND), "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(folder)
    return (*known, *new)


def line_record(line: Line) -> dict[str, Any]:
    record = asdict(line) | {"at": _date(line.at), "seeds": list(line.seeds)}
    if not line.imported:
        del record["imported"]
    if isinstance(line, DeclaredPlan):
        return record | {"kind": "plan"}
    return record | {"kind": "look", "judged": sorted(line.judged)}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _line(fields: Mapping[str, Any]) -> Line:
    """Return the declaration of a line. Raises an error that ``_refusing`` names if it is none."""
    family = {
        name: dict(zip(arms, _all(str, arms.values()), strict=True))
        for name, arms in fields["family"].items()
    }
    seeds = tuple(sorted(_all(int, fields["seeds"])))
    if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
        raise ValueError(f"different seeds of at least 0, got {str(seeds)[:60]}")
    at = datetime.fromisoformat(fields["at"]).timestamp()
    (imported,) = _all(bool, [fields.get("imported", False)])
    if fields["kind"] == "plan":
        rule, looks = dict(fields["rule"]), fields["look_plan"]
        for value in rule.values():
            _all(type(value) if isinstance(value, str | float | int) else str, [value])
        look_plan = LookPlan(tuple(_all(int, looks["seeds"])), tuple(map(float, looks["shares"])))
        if look_plan.problems:
            raise ValueError(look_plan.problems[0].what)
        return DeclaredPlan(rule, look_plan, seeds, family, at, imported)
    if fields["kind"] != "look":
        raise ValueError(f"a plan or a look, got {str(fields['kind'])[:60]}")
    (number, n), share = _all(int, [fields["number"], fields["n"]]), fields["share"]
    if n != len(seeds) or not seeds or not 0 < share <= 1:
        raise ValueError(f"a look at its seeds with a share of at most 1, got {n} and {share}")
    planned, added = _all(bool, [fields["planned"], fields["added"]])
    judged = dict.fromkeys(_all(str, fields["judged"]), at)
    (documents,) = _all(str, [fields["evaluation_set"]])
    return Look(number, n, share, planned, seeds, added, family, judged, documents, at, imported)


def _all(kind: type[T], values: Iterable[Any]) -> list[T]:
    """Return the values, which must have the JSON type ``kind``: True is an integer in Python only."""
    listed = list(values)
    for value in listed:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {json.dumps(value)[:60]}")
    return listed


def _former(path: Path) -> Iterator[Line]:
    """Yield the rule and the looks of an earlier version's record of words."""
    try:
        record = read_json_object(path)
    except MissingRecord:
        return
    if record.get("schema_version") != _FORMER_SCHEMA:
        return
    common = {"at": _date(path.stat().st_mtime), "imported": True}
    common["evaluation_set"] = record.get("evaluation_set") or ""
    judged = {
        Contrast.pair(v["step"], v["reference"]).name: dict.fromkeys(v["weights"], "")
        for v in record["verdicts"]
    }
    # Every factorial design has no simple effects.
    rule = {name: value for name, value in record["rule"].items() if name != "simple_effects"}
    for each in (record, *record["other_looks"]):
        looks, family = each["looks"], {**(judged if each is record else {})}
        families = [{n: dict.fromkeys(a, "") for n, a in look["family"].items()} for look in looks]
        for arms in families:
            family |= arms
        plan = {"kind": "plan", "rule": rule, "look_plan": each["look_plan"], "family": family}
        if family and each["look_plan"]:
            seeds = looks[-1]["seeds"] if looks else []
            yield _line({**common, **plan, "seeds": seeds})
        for look, arms in zip(looks, families, strict=True):
            new = {"number": look["look"], "judged": [*look["verdicts"]], "family": arms or judged}
            yield _line({**look, **common, **new, "kind": "look"})


def studies_on(evaluation_set: str, folder: Path, arms: Mapping[str, str]) -> list[str]:
    """Return the other studies, here and beside ``folder``, that were judged on the same documents.

    One whose declarations cannot be read may be of a study on any documents.
    """
    names: list[str] = []
    for other in sorted({folder, *folder.parent.glob("*/")}) if evaluation_set else ():
        try:
            lines = read_declarations(other)
        except ConfigError:
            names += [f"{other.name} (unreadable declarations)"] * (other != folder)
            continue
        own = concerning(lines, arms) if other == folder else []
        looks = [line for line in lines if isinstance(line, Look) and line not in own]
        if any(look.evaluation_set == evaluation_set for look in looks):
            names.append(other.name + " (another configuration)" * (other == folder))
    return names
