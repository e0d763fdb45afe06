"""Cases to check, derived from a configuration: steps of a study, a matrix, or one training.

A step that does not resolve is a case too; the check reports its problems.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2 import combinations
from gpt2.ablation import STUDIES
from gpt2.ablation.resolve import resolve_config, resolve_step
from gpt2.ablation.step import Study
from gpt2.config import Config
from gpt2.planning import STUDY_DEFCONFIG, config_layers
from gpt2.rules import refuse_lone_arms, wants_twins
from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree, defconfig_layers
from lib.kconfig.place import Place
from lib.project import ROOT


@dataclass(frozen=True)
class Case:
    """One step, combination or training, without its seeds."""

    # Name in the output, and value for STEPS=.
    label: str
    selector: str
    slug: str
    # None if the step does not resolve; ``problems`` has the reasons.
    config: Config | None
    problems: Sequence[Problem] = ()
    # Slug of the case that ``delta`` modifies; "" for a baseline.
    parent: str = ""
    delta: Mapping[str, Value] = field(default_factory=dict)
    # Declared range of the change in parameter count against the parent, as fractions.
    params: tuple[float, float] | None = None


@dataclass(frozen=True)
class Cases:
    """All cases that a configuration plans, and the chosen ones."""

    study: str
    every: Sequence[Case]
    chosen: Sequence[Case]

    def only(self, slugs: Sequence[str]) -> "Cases":
        """Return the same cases with only those in ``slugs`` chosen."""
        chosen = [case for case in self.every if case.slug in slugs]
        return Cases(self.study, self.every, chosen)


def checked_layers(build_dir: Path, defconfig: str = "") -> list[Layer]:
    """Return the layers of ``defconfig``, else of ``.config``, else of the RATIO study."""
    if defconfig:
        return defconfig_layers(ROOT, defconfig)
    if Place(ROOT, build_dir).config.exists():
        return config_layers(build_dir)
    return defconfig_layers(ROOT, STUDY_DEFCONFIG)


def find_cases(layers: Sequence[Layer], steps: str = "") -> Cases:
    """Return the cases of a configuration; ``steps`` chooses among them.

    Raises ConfigError if the configuration itself does not resolve, or if ``steps`` matches no
    step.
    """
    tree = Tree()
    base = resolve_config(tree, layers)
    match base.study.mode:
        case "ra_mla_ablation_mode":
            study = STUDIES[base.study.study]
            every = [_step(tree, layers, study, i) for i in range(len(study.steps))]
            _refuse_lone_arms(every)
            slugs = [step.slug for step in study.select(steps or base.study.steps)]
            return Cases(study.name, every, []).only(slugs)
        case "test_matrix_mode":
            every = _combinations(tree, layers, base)
            _refuse_lone_arms(every)
            return Cases("matrix", every, _matching(every, steps))
        case _:
            every = [Case("single/run", "", "run", base)]
            _refuse_lone_arms(every)
            return Cases("single", every, _matching(every, steps))


def _refuse_lone_arms(every: Sequence[Case]) -> None:
    """Apply the plan's rule on lone arms to the cases.

    Eager twins are not cases of their own, because a check compiles nothing.
    """
    configs = [case.config for case in every if case.config]
    if not wants_twins(configs):
        refuse_lone_arms(configs)


def _step(tree: Tree, layers: Sequence[Layer], study: Study, number: int) -> Case:
    step = study.steps[number]
    config, problems = None, ()
    try:
        config = resolve_step(tree, layers, study, step)
    except ConfigError as error:
        problems = tuple(error.problems)
    return Case(
        label=study.label(step),
        selector=str(number),
        slug=step.slug,
        config=config,
        problems=problems,
        parent=step.parent,
        delta=step.set,
        params=step.params if step.parent else None,
    )


def _combinations(tree: Tree, layers: Sequence[Layer], base: Config) -> list[Case]:
    """Return the combinations that the configuration allows; ``make plan`` lists the others."""
    return [
        Case(
            label=f"matrix/{variant.number:02d}-{variant.slug}",
            selector=variant.slug,
            slug=variant.slug,
            config=config,
            parent=variant.parent,
            delta=variant.delta or {},
        )
        for variant, config in combinations.matrix(tree, layers, base, yes=True).block
    ]


def _matching(every: Sequence[Case], patterns: str) -> list[Case]:
    """Return the cases selected by number, slug or pattern; all cases without patterns."""
    requested = patterns.replace(",", " ").split() or ["*"]

    def matches(number: int, case: Case, pattern: str) -> bool:
        return pattern in ("all", str(number)) or fnmatch.fnmatchcase(case.slug, pattern)

    unmatched = [p for p in requested if not any(matches(i, c, p) for i, c in enumerate(every))]
    if unmatched:
        available = ", ".join(case.slug for case in every)
        raise ConfigError(
            *(
                Problem(
                    f"{pattern!r} matches no step (available: {available})",
                    "STEPS",
                    code="usage.unknown-step",
                )
                for pattern in unmatched
            )
        )
    return [c for i, c in enumerate(every) if any(matches(i, c, p) for p in requested)]
