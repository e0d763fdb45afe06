"""Contrasts of a study: steps against their references, and the effects of a factorial design.

A factor is coded -1 (off) and +1 (on). An effect is the mean loss at +1 minus the mean loss at -1 of
its column; the column of an interaction is the product of two. Effects with equal columns are
aliased, and have one name, such as ``AB=CG=DH=EF``. Their model also has an intercept; interactions
of more factors are assumed to be 0.

If the configuration forbids cells, the model is fitted to the others by least squares: the weights of
an effect are a row of the pseudo-inverse. An effect outside the row space is not estimable.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lib.plan.designs import OFF, ON
from lib.plan.fractions import LETTERS, fraction, full_design
from lib.plan.run import RunVariant

# Roles of the comparison of an A/A step, and of an effect of a factorial design, whose variance the
# rule ``factorial`` takes from all runs.
AA_ROLE = "a/a"
# Role of a configuration that is trained twice against its first training.
REPEAT_ROLE = "repeat"
EFFECT = "effect"
# Smallest reported growth of a variance.
_INFLATED = 1.005

Cell = tuple[bool, ...]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of losses: a step against its reference, or an effect of a design."""

    step: str
    reference: str
    # "baseline", "parent", EFFECT or the name of another role.
    role: str
    # Arm → weight; step minus reference for a pair.
    weights: Mapping[str, float]

    @classmethod
    def pair(cls, step: str, reference: str, role: str = "baseline") -> "Contrast":
        """Return the contrast step minus reference."""
        return cls(step, reference, role, {step: 1.0, reference: -1.0})

    @property
    def name(self) -> str:
        """Return ``step vs reference``, or the name of an effect, which has no reference."""
        return f"{self.step} vs {self.reference}" if self.reference else self.step

    @property
    def ends(self) -> tuple[str, str]:
        """Return the names of step and reference, which identify the contrast."""
        return self.step, self.reference

    @property
    def scale(self) -> float:
        """Return the sum of squared weights: variance of the contrast / variance of a run."""
        return math.fsum(weight * weight for weight in self.weights.values())


@dataclass(frozen=True)
class DesignEffects:
    """The comparisons of a factorial design, which are all planned before the first run."""

    contrasts: Sequence[Contrast]
    # Name → why the cells that can be configured do not determine it.
    not_estimable: Mapping[str, str]
    # Name → variance / variance in the design without missing cells.
    inflated: Mapping[str, float]


@dataclass(frozen=True)
class DesignOptions:
    """Which effects of a factorial design are compared."""

    # factorial or fractional
    kind: str
    # Two-way interactions.
    interactions: bool = True
    # Of a full design, for each factor: adding it to none, leaving it out of all, and the difference.
    simple_effects: bool = False
    # Of a fraction: the factor over which it is folded, "" for none.
    folded: str = ""

    def effects(self, variants: Sequence[RunVariant]) -> DesignEffects | None:
        """Return the effects of the cells ``variants``; None if they are not cells of the design.

        Controls are not cells.
        """
        return _design_effects([variant for variant in variants if not variant.is_control], self)


def plan_contrasts(parents: Mapping[str, str], against: str = "both") -> list[Contrast]:
    """Return the family of a study: each step against the baseline, its parent, or both.

    ``parents`` maps each arm to its parent, the baseline first, to "". A step whose parent is the
    baseline, or that has none, is compared once.
    """
    if not parents:
        return []
    baseline, *steps = parents
    family = []
    for step in steps:
        parent = parents[step] or baseline
        if against != "parent" or parent == baseline:
            family.append(Contrast.pair(step, baseline))
        if against != "baseline" and parent != baseline:
            family.append(Contrast.pair(step, parent, "parent"))
    return family


def contrasts_of(
    variants: Sequence[RunVariant], against: str, design: DesignOptions | None = None
) -> list[Contrast]:
    """Return the planned comparisons of ``variants``; a parent outside the plan is left out.

    Those of a factorial ``design`` are its effects.

    A control is not part of any family.
    """
    effects = design.effects(variants) if design else None
    if effects is not None:
        return list(effects.contrasts)
    variants = [variant for variant in variants if not variant.is_control]
    names = [variant.slug for variant in variants]
    baseline = next((v.slug for v in variants if not v.parent), "")
    parents = {v.slug: v.parent if v.parent in names else "" for v in variants}
    if not baseline:
        return [Contrast.pair(step, parent, "parent") for step, parent in parents.items() if parent]
    return plan_contrasts({baseline: "", **parents}, against)


def control_contrasts(variants: Sequence[RunVariant]) -> list[Contrast]:
    """Return the comparison of each control with its parent, if the parent is planned."""
    names = {variant.slug for variant in variants}
    controls = [variant for variant in variants if variant.is_control and variant.parent in names]
    return [
        Contrast.pair(step.slug, step.parent, AA_ROLE if step.is_aa else REPEAT_ROLE)
        for step in controls
    ]


# Effects of a factorial design.


def _design_effects(variants: Sequence[RunVariant], options: DesignOptions) -> DesignEffects | None:
    levels = [variant.levels for variant in variants]
    if not levels or any(each is None or set(each.values()) - {ON, OFF} for each in levels):
        return None
    factors = list(levels[0] or ())
    is_full = options.kind == "factorial"
    folded = factors.index(options.folded) if options.folded else None
    planned = full_design(len(factors)) if is_full else fraction(len(factors), folded)
    cells = {
        tuple(level == ON for level in (variant.levels or {}).values()): variant.slug
        for variant in variants
    }
    named = _Names(factors, planned, cells)
    strings = named.strings(options.interactions)
    contrasts, missing, inflated = _fitted(named, strings)
    if options.simple_effects and is_full and len(factors) > 1:
        for contrast, reason in named.simple_effects():
            if contrast is None:
                missing.update(reason)
            else:
                contrasts.append(contrast)
    return DesignEffects(contrasts, missing, inflated)


@dataclass(frozen=True)
class _Names:
    """Factors, planned cells and configurable cells of one design."""

    factors: Sequence[str]
    planned: Sequence[Cell]
    # Cell → slug of its variant.
    cells: Mapping[Cell, str]

    def strings(self, interactions: bool) -> dict[str, tuple[int, ...]]:
        """Return {name: factors of one member} of all effects that the planned cells separate."""
        count = len(self.factors)
        members: list[tuple[int, ...]] = [(i,) for i in range(count)]
        if interactions:
            members += itertools.combinations(range(count), 2)
        by_column: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for member in members:
            column = tuple(_sign(cell, member) for cell in self.planned)
            by_column.setdefault(column, []).append(member)
        return {"=".join(map(self._name, group)): group[0] for group in by_column.values()}

    def _name(self, member: tuple[int, ...]) -> str:
        letters = "".join(_letter(i) for i in member)
        return f"{letters} {self.factors[member[0]]}" if len(member) == 1 else letters

    def reason(self, member: tuple[int, ...] = ()) -> str:
        """Return why cells are missing, with a dependency of the factors of ``member`` if any."""
        facts = list(self._dependencies())
        concerned = [text for pair, text in facts if set(pair) & set(member)]
        lost = len(self.planned) - len(self.cells)
        counted = f"{lost} of {len(self.planned)} cells cannot be configured"
        return next(iter([*concerned, *(text for _, text in facts)]), counted)

    def _dependencies(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield factors, and the dependency between them that the missing cells show."""
        for i, factor in enumerate(self.factors):
            if not any(cell[i] for cell in self.cells):
                yield (i,), f"{factor} is never on"
        for i, j in itertools.permutations(range(len(self.factors)), 2):
            on = [cell for cell in self.cells if cell[i]]
            if on and all(cell[j] for cell in on) and not all(cell[j] for cell in self.planned):
                yield (i, j), f"{self.factors[i]} needs {self.factors[j]}"
            if i < j and on and not any(cell[j] for cell in on):
                yield (i, j), f"{self.factors[i]} excludes {self.factors[j]}"

    def simple_effects(self) -> Iterator[tuple[Contrast | None, Mapping[str, str]]]:
        """Yield the simple effects of each factor, or the reason if a cell is missing."""
        count = len(self.factors)
        none, whole = (False,) * count, (True,) * count
        for i, factor in enumerate(self.factors):
            alone = tuple(j == i for j in range(count))
            without = tuple(j != i for j in range(count))
            name = f"{_letter(i)} {factor} in all vs alone"
            slugs = [self.cells.get(cell) for cell in (whole, without, alone, none)]
            if None in slugs:
                yield None, {name: self.reason((i,))}
                continue
            full, left_out, added, empty = (slug or "" for slug in slugs)
            weights: dict[str, float] = {}
            for slug, weight in zip((full, left_out, added, empty), (1, -1, -1, 1), strict=True):
                weights[slug] = weights.get(slug, 0.0) + weight
            yield Contrast.pair(added, empty, "added"), {}
            yield Contrast.pair(left_out, full, "left out"), {}
            yield Contrast(name, "", "simple effects", weights), {}


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else f"[{index + 1}]"


def _sign(cell: Cell, member: Sequence[int]) -> int:
    return -1 if sum(not cell[i] for i in member) % 2 else 1


def _fitted(
    named: _Names, strings: Mapping[str, tuple[int, ...]]
) -> tuple[list[Contrast], dict[str, str], dict[str, float]]:
    """Return the estimable effects, the others with reasons, and the inflated variances."""
    cells = list(named.cells)
    rows = [[1, *(_sign(cell, member) for member in strings.values())] for cell in cells]
    solutions = _normal_equations(rows)
    contrasts: list[Contrast] = []
    missing: dict[str, str] = {}
    inflated: dict[str, float] = {}
    for (name, member), solution in zip(strings.items(), solutions[1:], strict=True):
        if solution is None:
            missing[name] = named.reason(member)
            continue
        # A coefficient is half of the difference between +1 and -1.
        common = math.lcm(*(u.denominator for u in solution))
        whole = [u.numerator * (common // u.denominator) for u in solution]
        weights = {
            named.cells[cell]: Fraction(2 * sum(map(operator.mul, row, whole)), common)
            for cell, row in zip(cells, rows, strict=True)
        }
        scale = sum(weight * weight for weight in weights.values())
        growth = float(scale * len(named.planned) / 4)
        if growth >= _INFLATED:
            inflated[name] = growth
        kept = {slug: float(weight) for slug, weight in weights.items() if weight}
        contrasts.append(Contrast(name, "", EFFECT, kept))
    return contrasts, missing, inflated


def _normal_equations(rows: Sequence[Sequence[int]]) -> list[list[Fraction] | None]:
    """Return for each column j of the matrix ``rows`` (X) a solution u of XᵀX u = e_j, or None.

    X u is then row j of the pseudo-inverse. None means that e_j is outside the row space. Exact:
    rational numbers leave no tolerance to choose.
    """
    width, columns = len(rows[0]), list(zip(*rows, strict=True))
    table = [
        [Fraction(sum(map(operator.mul, columns[i], columns[j]))) for j in range(width)]
        + [Fraction(int(i == j)) for j in range(width)]
        for i in range(width)
    ]
    pivots: list[int] = []
    for column in range(width):
        rank = len(pivots)
        pivot = next((i for i in range(rank, width) if table[i][column]), None)
        if pivot is None:
            continue
        table[rank], table[pivot] = table[pivot], table[rank]
        lead = table[rank][column]
        table[rank] = [value / lead if value else value for value in table[rank]]
        for i in range(width):
            if i != rank and (factor := table[i][column]):
                table[i] = [
                    a - factor * b if b else a for a, b in zip(table[i], table[rank], strict=True)
                ]
        pivots.append(column)
    solutions: list[list[Fraction] | None] = []
    for j in range(width, 2 * width):
        if any(table[i][j] for i in range(len(pivots), width)):
            solutions.append(None)
            continue
        solution = [Fraction(0)] * width
        for i, column in enumerate(pivots):
            solution[column] = table[i][j]
        solutions.append(solution)
    return solutions
