"""Contrasts of a study: steps against their references, and the effects of a factorial design.

An effect is a mean of paired contrasts, over the pairs of cells that can be configured and differ in one
feature alone, or the squares that differ in two (docs/verdicts.md).
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.runs.run import OFF, ON, RunVariant

# Roles of the comparison of an A/A step, and of an effect of a factorial design, whose variance the
# rule ``factorial`` takes from all runs.
AA_ROLE = "a/a"
# Role of a configuration that is trained twice against its first training.
REPEAT_ROLE = "repeat"
CONTROL_ROLES = (AA_ROLE, REPEAT_ROLE)
EFFECT = "effect"
# Names of the features of a design, without I, which is the identity.
_LETTERS = "ABCDEFGHJK"
# Smallest reported growth of a variance.
_INFLATED = 1.005

# Whether each feature of a design is on.
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
    # Beginning of the names of its part of a study; each part has a variance of its own.
    part: str = ""

    @classmethod
    def pair(cls, step: str, reference: str, role: str = "baseline") -> "Contrast":
        return cls(step, reference, role, {step: 1.0, reference: -1.0})

    def in_part(self, part: str) -> "Contrast":
        weights = {f"{part}{arm}": weight for arm, weight in self.weights.items()}
        reference = self.reference and f"{part}{self.reference}"
        return Contrast(f"{part}{self.step}", reference, self.role, weights, part)

    @property
    def name(self) -> str:
        """Return ``step vs reference``, or the name of an effect, which has no reference."""
        return f"{self.step} vs {self.reference}" if self.reference else self.step


def scale_of(weights: Mapping[str, float]) -> float:
    """Return the sum of the squared weights: variance of the contrast / variance of a run."""
    return math.fsum(weight * weight for weight in weights.values())


@dataclass(frozen=True)
class DesignEffects:
    """The comparisons of a factorial design, which are all planned before the first run."""

    contrasts: list[Contrast]
    # Name → how many cells are missing.
    not_estimable: dict[str, str]
    # Name → variance / variance in the design without missing cells.
    inflated: dict[str, float]


def contrasts_of(
    variants: Sequence[RunVariant], against: str, interactions: bool | None = None
) -> list[Contrast]:
    """Return the planned comparisons of ``variants``; a control is not part of any family.

    Those of a factorial design are its effects. The cells of a grid that predict one text are compared
    with the first of them.
    """
    effects = design_effects(variants, interactions)
    if effects is not None:
        return list(effects.contrasts)
    by_text: dict[str, list[RunVariant]] = {}
    for variant in variants:
        if not variant.is_control:
            by_text.setdefault(variant.text, []).append(variant)
    return [contrast for each in by_text.values() for contrast in _contrasts(each, against)]


def _contrasts(variants: Sequence[RunVariant], against: str) -> list[Contrast]:
    """Return the comparisons of variants that predict the same text.

    Each step is compared with the baseline, which is the first without a parent, with its parent, or
    with both; once, if its parent is the baseline or is not planned.
    """
    slugs = {variant.slug for variant in variants}
    baseline = next((v.slug for v in variants if not v.parent), "")
    family = []
    for variant in variants:
        step, parent = variant.slug, variant.parent if variant.parent in slugs else baseline
        if step == baseline:
            continue
        if baseline and (against != "parent" or parent == baseline):
            family.append(Contrast.pair(step, baseline))
        if parent != baseline and (against != "baseline" or not baseline):
            family.append(Contrast.pair(step, parent, "parent"))
    return family


def control_contrasts(variants: Sequence[RunVariant]) -> list[Contrast]:
    """Return the comparison of each control with its parent, if the parent is planned."""
    names = {variant.slug for variant in variants}
    return [
        Contrast.pair(step.slug, step.parent, AA_ROLE if step.is_aa else REPEAT_ROLE)
        for step in variants
        if step.is_control and step.parent in names
    ]


# Effects of a factorial design.


def design_effects(
    variants: Sequence[RunVariant], interactions: bool | None
) -> DesignEffects | None:
    """Return the effects of the cells ``variants``, with or without two-way ``interactions``.

    None for another design (``interactions`` is None), or if a variant that is no control is no cell.
    """
    variants = [variant for variant in variants if not variant.is_control]
    levels = [variant.levels for variant in variants]
    cellular = bool(levels) and not any(e is None or set(e.values()) - {ON, OFF} for e in levels)
    if interactions is None or not cellular:
        return None
    factors = list(levels[0] or ())
    cells = {
        tuple(level == ON for level in (variant.levels or {}).values()): variant.slug
        for variant in variants
    }
    numbers = range(len(factors))
    members: list[tuple[int, ...]] = [(i,) for i in numbers]
    if interactions:
        members += itertools.combinations(numbers, 2)
    effects = DesignEffects([], {}, {})
    for member in members:
        letters = "".join(_LETTERS[i] if i < len(_LETTERS) else f"[{i + 1}]" for i in member)
        name = letters if len(member) > 1 else f"{letters} {factors[member[0]]}"
        contrast = Contrast(name, "", EFFECT, _weights(cells, member))
        if not contrast.weights:
            missing = 2 ** len(factors) - len(cells)
            effects.not_estimable[name] = (
                f"{missing} of {2 ** len(factors)} cells cannot be configured"
            )
            continue
        effects.contrasts.append(contrast)
        if (growth := scale_of(contrast.weights) * 2 ** len(factors) / 4) >= _INFLATED:
            effects.inflated[name] = growth
    return effects


def _weights(cells: Mapping[Cell, str], member: Sequence[int]) -> dict[str, float]:
    """Return the weights of the runs in the effect of the factors ``member``; {} without any group.

    A group is all cells that differ in these factors alone.
    """
    groups = {cell: tuple(on for i, on in enumerate(cell) if i not in member) for cell in cells}
    sizes = Counter(groups.values())
    used = [cell for cell, group in groups.items() if sizes[group] == 2 ** len(member)]
    signs = {cell: -1 if sum(not cell[i] for i in member) % 2 else 1 for cell in used}
    return {cells[cell]: 2 * sign / len(used) for cell, sign in signs.items()}
