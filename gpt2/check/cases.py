"""Cases to check, derived from a configuration: steps of a study, a matrix, or one training.

A step that does not resolve is a case too; the check ``resolve`` reports its problems. Imports no
torch.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2.check import Check
from gpt2.check.finding import CheckFinding
from gpt2.config import Config, refuse_unpaired_compile
from gpt2.memory.micro_batch import with_one_sequence
from gpt2.study.designs import combinations
from gpt2.study.plan import STUDY_DEFCONFIG, config_layers
from gpt2.study.resolve import refused_steps, resolve_config, resolve_step
from gpt2.study.step import Study
from gpt2.study.study_file import study_of
from lib.config.dotconfig import ConfigWorkspace, defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.project import ROOT


@dataclass(frozen=True)
class CheckCase:
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
    delta: Mapping[str, SymbolValue] = field(default_factory=dict)
    # Declared range of the change in parameter count against the parent, as fractions.
    params: tuple[float, float] | None = None
    # The change in words; "" if the case is not a step of a study.
    title: str = ""


@dataclass(frozen=True)
class CheckJob:
    """Work on one case, for a worker."""

    case: CheckCase
    checks: Sequence[Check]
    # True if the fingerprint is needed, to compare the cases with each other.
    fingerprint: bool = False


@dataclass(frozen=True)
class CheckPlan:
    """All cases that a configuration plans, and the chosen ones."""

    study: str
    every: Sequence[CheckCase]
    chosen: Sequence[CheckCase]

    def only(self, slugs: Sequence[str]) -> "CheckPlan":
        """Return the same cases with only those in ``slugs`` chosen."""
        chosen = [case for case in self.every if case.slug in slugs]
        return CheckPlan(self.study, self.every, chosen)


def config_layers_to_check(build_dir: Path, defconfig: str = "") -> list[ConfigLayer]:
    """Return the layers of ``defconfig``, else of ``.config``, else of the RATIO study."""
    if defconfig:
        return defconfig_layers(ROOT, defconfig)
    if ConfigWorkspace(ROOT, build_dir).config.exists():
        return config_layers(build_dir)
    return defconfig_layers(ROOT, STUDY_DEFCONFIG)


def plan_cases(
    layers: Sequence[ConfigLayer], steps: str = "", build_dir: Path = Path()
) -> CheckPlan:
    """Return the cases of a configuration; ``steps`` chooses among them.

    The file of an own study is relative to ``build_dir``.

    Raises ConfigError if the configuration itself does not resolve, or if ``steps`` matches no
    step.
    """
    tree = KconfigTree()
    layers = with_one_sequence(tree, layers)
    base = resolve_config(tree, layers)
    match base.study.mode:
        case "ra_mla_ablation_mode":
            study = study_of(base.study, build_dir)
            every = [_step(tree, layers, study, i) for i in range(len(study.steps))]
            _refuse_unpaired_compile(every)
            slugs = [step.slug for step in study.select(steps or base.study.steps)]
            cases = CheckPlan(study.name, every, []).only(slugs)
            _require_steps(cases, study)
            return cases
        case "test_matrix_mode":
            every = _combinations(tree, layers, base)
            _refuse_unpaired_compile(every)
            return CheckPlan("matrix", every, _matching(every, steps))
        case _:
            every = [CheckCase("single/run", "", "run", base)]
            _refuse_unpaired_compile(every)
            return CheckPlan("single", every, _matching(every, steps))


def _require_steps(cases: CheckPlan, study: Study) -> None:
    """Raise ConfigError if the study refuses a chosen step."""
    configs = {case.slug: case.config for case in cases.every if case.config}
    chosen = {case.slug for case in cases.chosen}
    problems = [p for step, p in refused_steps(study, configs) if step.slug in chosen]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def _refuse_unpaired_compile(every: Sequence[CheckCase]) -> None:
    refuse_unpaired_compile([case.config for case in every if case.config])


def _step(tree: KconfigTree, layers: Sequence[ConfigLayer], study: Study, number: int) -> CheckCase:
    step = study.steps[number]
    config, title, problems = None, step.title, tuple[Problem, ...]()
    try:
        variant, config = resolve_step(tree, layers, study, step)
        title = variant.title
    except ConfigError as error:
        problems = tuple(error.problems)
    return CheckCase(
        label=study.label(step),
        selector=str(number),
        slug=step.slug,
        config=config,
        problems=problems,
        parent=step.parent,
        delta=step.set,
        params=step.params if step.parent else None,
        title=title,
    )


def _combinations(
    tree: KconfigTree, layers: Sequence[ConfigLayer], base: Config
) -> list[CheckCase]:
    """Return the combinations that the configuration allows; ``make plan`` lists the others."""
    return [
        CheckCase(
            label=f"matrix/{variant.number:02d}-{variant.slug}",
            selector=variant.slug,
            slug=variant.slug,
            config=config,
            parent=variant.parent,
            delta=variant.delta or {},
        )
        for variant, config in combinations(tree, layers, base, yes=True).block
    ]


def _matching(every: Sequence[CheckCase], patterns: str) -> list[CheckCase]:
    """Return the cases selected by number, slug or pattern; all cases without patterns."""
    requested = patterns.replace(",", " ").split() or ["*"]

    def matches(number: int, case: CheckCase, pattern: str) -> bool:
        return pattern in ("all", str(number)) or fnmatch.fnmatchcase(case.slug, pattern)

    unmatched = [p for p in requested if not any(matches(i, c, p) for i, c in enumerate(every))]
    if unmatched:
        available = ", ".join(case.slug for case in every)
        raise ConfigError(
            *(
                Problem(
                    f"{pattern!r} matches no step (available: {available})",
                    "STEPS",
                    "type: make plan, to list the steps",
                    code="usage.unknown-step",
                )
                for pattern in unmatched
            )
        )
    return [c for i, c in enumerate(every) if any(matches(i, c, p) for p in requested)]


def check_resolve(case: CheckCase) -> list[CheckFinding]:
    """Check that every assignment of the case takes effect, and that all rules are satisfied."""
    return [
        CheckFinding(
            "resolved-configuration",
            "a step that resolves",
            "; ".join(line.strip() for line in str(problem).splitlines()),
        )
        for problem in case.problems
    ]
