"""Declarations of a study: rule, family, planned looks, and each look that was taken.

The error rate rests on them: a family must not shrink after results are seen, and a look costs its
share of alpha whatever it showed. They are the lines of one file beside the runs, appended before a
run starts or a look is judged, and read as an input of the verdicts. A word is never among them.

A folder may have several studies, such as before and after a change of MAX_ITERS. A line concerns a
study if they have a run in common: name and configuration, without the seed.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

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
from lib.report.options import NATS, LookPlan, sum_of_shares
from lib.report.statistics import VerdictRule

DECLARATIONS_FILE = "declarations.jsonl"
# Written by earlier versions of this program, with words; imported once, without them.
_FORMER_FILE, _FORMER_SCHEMA = "verdicts.json", 3
_ADVICE = "move it aside: its looks then no longer count, and the report says so"
_MAX_BYTES = 1 << 26

# Name of a comparison → arm → digest of its configuration without the seed, "" if unknown.
Family = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class DeclaredPlan:
    """What a study declared before its runs: rule, planned looks, seeds, and comparisons."""

    rule: Mapping[str, Any]
    looks: LookPlan
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
    is_at_added: bool = False
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
    """Declarations before the first run (rule, looks, comparisons), and those recorded earlier."""

    rule: VerdictRule = field(default_factory=VerdictRule)
    # both, baseline or parent
    against: str = "both"
    # Of a factorial design, whose effects are compared instead of its runs: whether the two-way
    # interactions are, too. None for another design.
    interactions: bool | None = None
    # Planned looks; None judges once, without looks.
    looks: LookPlan | None = None
    # Seeds of the next look; all that have a run if empty.
    seeds: tuple[int, ...] = ()
    # Comparisons of the configured study, those of its A/A steps and repeats included.
    declared: Sequence[Contrast] = ()
    # Arm → digest of its configuration without the seed.
    configurations: Mapping[str, str] = field(default_factory=dict)
    # All lines of the study's folder; None if nothing is written.
    declarations: tuple[Line, ...] = ()
    folder: Path | None = None
    # True if rows are split by labels, or nothing is written: no look is taken.
    exploratory: bool = False
    # The look that was declared last, for these verdicts; None if none was due.
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
    """Return each look once, numbered from 1: several processes may have declared it.

    A look without alpha left for it cannot give a word and is left out.
    """
    looks: dict[Any, Look] = {}
    for line in lines:
        if isinstance(line, Look):
            key = (line.seeds, line.is_at_added and tuple(sorted(line.family)))
            first = looks.setdefault(key, line)
            looks[key] = replace(first, judged={**line.judged, **first.judged})
    counted: list[Look] = []
    for look in looks.values():
        if sum_of_shares([*(each.share for each in counted), look.share]) <= 1:
            counted.append(replace(look, number=len(counted) + 1))
    return counted


def concerning(lines: Iterable[Line], arms: Mapping[str, str]) -> list[Line]:
    return [
        line
        for line in lines
        if any(
            name in arms and _same_digest(digest, arms[name])
            for each in line.family.values()
            for name, digest in each.items()
        )
    ]


def _same_digest(one: str, other: str) -> bool:
    return one == other or not one or not other


def is_declared(name: str, arms: Mapping[str, str], family: Family) -> bool:
    """Return whether ``family`` has the comparison ``name`` of these arms and configurations."""
    known = family.get(name)
    return (
        known is not None
        and known.keys() == arms.keys()
        and all(_same_digest(digest, arms[arm]) for arm, digest in known.items())
    )


def family_size(families: Iterable[Family]) -> int:
    """Return the number of different comparisons: of other arms or configurations is another one."""
    known: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for family in families:
        for name, arms in family.items():
            digests = known.setdefault((name, *sorted(arms)), set())
            if all(arms.values()):
                digests.add(tuple(arms[arm] for arm in sorted(arms)))
    return sum(max(1, len(digests)) for digests in known.values())


# Looks: the numbers of seeds after which a study is judged, and the part of alpha that each spends.
#
# Each look j tests the undecided comparisons at ``share_j * alpha``. The shares of all looks sum to
# at most 1, so the probability of a false word stays below alpha at any number of looks (union bound;
# the plain form of the group-sequential procedures in Tamhane et al. 2021). What the planned looks
# leave is the reserve: each unplanned look takes half of the rest.


def judged_seeds(looks: Sequence[Look]) -> int:
    return max((look.n for look in looks), default=0)


def reserve_share(plan: LookPlan, looks: Sequence[Look]) -> float:
    """Return the share of an unplanned look after ``looks``: half of the rest of the reserve."""
    unplanned = [look.share for look in looks if not look.planned]
    planned = [look.share for look in looks if look.planned]
    # Looks of several studies that were joined may have planned more than one plan.
    left = min(plan.reserve, 1 - sum_of_shares(planned)) - sum_of_shares(unplanned)
    return float(max(Decimal(0), left / 2))


def due_look(plan: LookPlan, looks: Sequence[Look], n: int) -> Look | None:
    """Return the look to take after ``n`` blocks; None if none is due, or no alpha is left."""
    judged, number = judged_seeds(looks), len(looks) + 1
    if n <= judged:
        return None
    waiting = [(s, share) for s, share in plan.spending if s > judged]
    if not waiting:
        share = reserve_share(plan, looks)
        return Look(number, n, share, planned=False) if share else None
    # The share of a skipped planned look is lost.
    shares = [share for seeds, share in waiting if seeds <= n]
    return Look(number, n, shares[-1], planned=True) if shares else None


def share_at(plan: LookPlan, looks: Sequence[Look], n: int) -> float:
    """Return the share of the look that decides about ``n`` seeds, if it is the next one."""
    judged = judged_seeds(looks)
    coming = (share for seeds, share in plan.spending if seeds > judged and seeds >= n)
    return next(coming, None) or reserve_share(plan, looks)


# The file.


def read_declarations(folder: Path) -> tuple[Line, ...]:
    """Return the declarations of the studies in ``folder``; those of a former record if none.

    A part of a line that a crash left declares nothing. Raises ConfigError with the line that is
    damaged: it may be a look, which must not be forgotten.
    """
    path, former = folder / DECLARATIONS_FILE, folder / _FORMER_FILE
    try:
        content = read_record(path, "one JSON object per line", _MAX_BYTES)
    except MissingRecord:
        content = b""
    except RecordError as error:
        raise _damaged(error) from None
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
    except RecordError as error:
        raise _damaged(error) from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        text = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise _damaged(RecordError(path, expected, text[:200], line)) from None


def _damaged(error: RecordError) -> ConfigError:
    return ConfigError(*(replace(problem, next=_ADVICE) for problem in error.problems))


def append_declarations(
    folder: Path, missing: Callable[[Sequence[Line]], Sequence[Line]]
) -> tuple[Line, ...]:
    """Append the declarations that ``missing`` returns for the present ones; return all of them.

    Other processes wait meanwhile. A part of a line that a crash left is removed: nothing was judged
    before the whole line was on the disk. Raises ConfigError if the file is damaged, RunError if it
    is a link.
    """
    known = read_declarations(folder)
    if not missing(known):
        return known
    path = folder / DECLARATIONS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    with naming(path), file_lock(path):
        known = read_declarations(folder)
        new = list(missing(known))
        # The imported ones are not in the file yet.
        lines = [*known, *new] if not path.stat().st_size else new
        if new:
            _append(path, "".join(canonical_json(line_record(line)) + "\n" for line in lines))
    return (*known, *new)


def _append(path: Path, text: str) -> None:
    descriptor = no_follow(path, os.O_RDWR | os.O_APPEND)
    with open(descriptor, "r+b", buffering=0) as file:
        os.ftruncate(descriptor, file.read().rfind(b"\n") + 1)
        data = text.encode()
        while data:
            data = data[file.write(data) :]
        os.fsync(descriptor)
    fsync_directory(path.parent)


def line_record(line: Line) -> dict[str, Any]:
    record = asdict(line) | {"at": _date(line.at), "seeds": list(line.seeds)}
    if not line.imported:
        del record["imported"]
    if isinstance(line, DeclaredPlan):
        return record | {"kind": "plan", "look_plan": record.pop("looks")}
    added, judged = record.pop("is_at_added"), sorted(line.judged)
    return record | {"kind": "look", "added": added, "judged": judged}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _line(fields: Mapping[str, Any]) -> Line:
    """Return the declaration of a line. Raises KeyError, TypeError or ValueError if it is none."""
    family = {
        name: {arm: _typed(digest, str) for arm, digest in _typed(arms, dict).items()}
        for name, arms in _typed(fields["family"], dict).items()
    }
    seeds = tuple(sorted(_typed(seed, int) for seed in _typed(fields["seeds"], list)))
    if len(set(seeds)) < len(seeds) or min(seeds, default=0) < 0:
        raise ValueError(f"different seeds of at least 0, got {str(seeds)[:60]}")
    at = datetime.fromisoformat(_typed(fields["at"], str)).timestamp()
    imported = _typed(fields.get("imported", False), bool)
    if fields["kind"] == "plan":
        rule = {
            n: _typed(v, str, float, int, bool) for n, v in _typed(fields["rule"], dict).items()
        }
        return DeclaredPlan(rule, _look_plan(fields["look_plan"]), seeds, family, at, imported)
    if fields["kind"] != "look":
        raise ValueError(f"a plan or a look, got {str(fields['kind'])[:60]}")
    n, share = _typed(fields["n"], int), _typed(fields["share"], float, int)
    if n != len(seeds) or not seeds or not 0 < share <= 1:
        raise ValueError(f"a look at its seeds with a share of at most 1, got {n} and {share}")
    return Look(
        number=_typed(fields["number"], int),
        n=n,
        share=share,
        planned=_typed(fields["planned"], bool),
        seeds=seeds,
        is_at_added=_typed(fields["added"], bool),
        family=family,
        judged={_typed(name, str): at for name in _typed(fields["judged"], list)},
        evaluation_set=_typed(fields["evaluation_set"], str),
        at=at,
        imported=imported,
    )


def _typed(value: Any, *kinds: type) -> Any:
    # Not isinstance: True is an integer in Python, but not in JSON.
    if type(value) not in kinds:
        raise TypeError(f"expected {kinds[0].__name__}, got {json.dumps(value)[:60]}")
    return value


def _look_plan(value: Any) -> LookPlan:
    shares = tuple(float(_typed(s, float, int)) for s in _typed(value["shares"], list))
    plan = LookPlan(tuple(_typed(n, int) for n in _typed(value["seeds"], list)), shares)
    if plan.problems:
        raise ValueError(plan.problems[0].what)
    return plan


def _former(path: Path) -> list[Line]:
    """Return plan and looks of each study of an earlier version's record of words; the looks come
    after the first rule.
    """
    try:
        record = read_json_object(path)
    except MissingRecord:
        return []
    if record.get("schema_version") != _FORMER_SCHEMA:
        return []
    common = {"at": _date(path.stat().st_mtime), "imported": True}
    rules = [_typed(each["rule"], dict) for each in (*record["former"], record)]
    for rule in rules:
        if not rule.get("simple_effects", True):
            # Every factorial design has none.
            del rule["simple_effects"]
    judged = {
        Contrast.pair(v["step"], v["reference"]).name: dict.fromkeys(v["weights"], "")
        for v in record["verdicts"]
    }
    lines: list[dict[str, Any]] = []
    for each in (record, *record["other_looks"]):
        looks, family = [], {**(judged if each is record else {})}
        for look in each["looks"]:
            planned = _typed(look["family"], dict).items()
            arms = {name: dict.fromkeys(arms, "") for name, arms in planned} or judged
            looks.append({**look, **common, "kind": "look", "family": arms})
            looks[-1] |= {"number": look["look"], "judged": list(look["verdicts"])}
            looks[-1] |= {"evaluation_set": record.get("evaluation_set") or ""}
            family |= arms
        seeds = looks[-1]["seeds"] if looks else []
        plan = {**common, "kind": "plan", "look_plan": each["look_plan"], "seeds": seeds}
        plans = [{**plan, "family": family, "rule": rule} for rule in rules]
        lines += [plans[0], *looks, *plans[1:]] if each["look_plan"] and family else []
    return [_line(line) for line in lines]


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
