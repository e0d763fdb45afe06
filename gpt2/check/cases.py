"""From a configuration to what is checked: the steps of a study, a matrix, or one training.

A step that does not resolve is a case too: its problems are what the check has to tell.
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

    # How output names it, and what STEPS= takes.
    label: str
    selector: str
    slug: str
    # None where it does not resolve, for the reasons in ``problems``.
    config: Config | None
    problems: Sequence[Problem] = ()
    # Slug of the case that ``delta`` changes; "" for a baseline.
    parent: str = ""
    delta: Mapping[str, Value] = field(default_factory=dict)
    # Promised change of the parameter count against the parent, as fractions.
    params: tuple[float, float] | None = None


@dataclass(frozen=True)
class Cases:
    """All that a configuration plans, and which of it is to be checked."""

    study: str
    every: Sequence[Case]
    chosen: Sequence[Case]

    def only(self, slugs: Sequence[str]) -> "Cases":
        """The same with the cases of ``slugs`` alone."""
        chosen = [case for case in self.every if case.slug in slugs]
        return Cases(self.study, self.every, chosen)


def checked_layers(build_dir: Path, defconfig: str = "") -> list[Layer]:
    """The layers of ``defconfig``, else of ``.config``, else of the RATIO study."""
    if defconfig:
        return defconfig_layers(ROOT, defconfig)
    if Place(ROOT, build_dir).config.exists():
        return config_layers(build_dir)
    return defconfig_layers(ROOT, STUDY_DEFCONFIG)


def find_cases(layers: Sequence[Layer], steps: str = "") -> Cases:
    """The cases of a configuration; ``steps`` chooses among them.

    ConfigError where the configuration itself does not resolve, or ``steps`` names nothing.
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
    """As a plan does, whose eager twins are no cases of their own: a check compiles nothing."""
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
    """Those that the configuration allows; ``make plan`` lists the others."""
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
    """Cases by number, slug or pattern; all of them without patterns."""
    words = patterns.replace(",", " ").split() or ["*"]

    def names(number: int, case: Case, word: str) -> bool:
        return word in ("all", str(number)) or fnmatch.fnmatchcase(case.slug, word)

    lost = [w for w in words if not any(names(i, c, w) for i, c in enumerate(every))]
    if lost:
        known = ", ".join(case.slug for case in every)
        raise ConfigError(*(Problem(f"{w!r} names nothing; known: {known}", "STEPS") for w in lost))
    return [c for i, c in enumerate(every) if any(names(i, c, w) for w in words)]
