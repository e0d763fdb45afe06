"""Cases to check, derived from a configuration: steps of a study, a matrix, or one training.

A step that does not resolve is a case too. Imports no torch.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2.config import Config, refuse_adapters_without_base, refuse_unpaired_compile
from gpt2.memory.micro_batch import with_one_sequence
from gpt2.study.designs import combinations
from gpt2.study.plan import config_layers
from gpt2.study.resolve import refused_steps, resolve_config, resolve_step
from gpt2.study.step import Step, Study
from gpt2.study.study_file import study_of
from lib.config.dotconfig import ConfigWorkspace, defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.project import ROOT

# Without a .config.
_STUDY_DEFCONFIG = "gpt2-ratio-ablation"


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
    if not defconfig and ConfigWorkspace(ROOT, build_dir).config.exists():
        return config_layers(build_dir)
    return defconfig_layers(ROOT, defconfig or _STUDY_DEFCONFIG)


def plan_cases(
    layers: Sequence[ConfigLayer], steps: str = "", build_dir: Path = Path()
) -> CheckPlan:
    """Return the cases of a configuration; ``steps`` chooses among them.

    The file of an own study is relative to ``build_dir``. Raises ConfigError if the configuration
    itself does not resolve, if the study refuses a chosen step, or if ``steps`` matches no step.
    """
    tree = KconfigTree()
    layers = with_one_sequence(tree, layers)
    base = resolve_config(tree, layers)
    study, name = None, "single"
    match base.study.mode:
        case "ra_mla_ablation_mode":
            study = study_of(base.study, build_dir)
            every = [_step(tree, layers, study, step) for step in study.steps]
        case "test_matrix_mode":
            name = "matrix"
            # The combinations that the configuration allows; ``make plan`` lists the others.
            every = [
                CheckCase(
                    label=f"matrix/{variant.number:02d}-{variant.slug}",
                    selector=variant.slug,
                    slug=variant.slug,
                    config=config,
                    parent=variant.parent,
                    delta=variant.delta or {},
                )
                for variant, config in combinations(tree, layers, base, yes=True)[0]
            ]
        case _:
            every = [CheckCase("single/run", "", "run", base)]
    configs = {case.slug: case.config for case in every if case.config}
    refuse_unpaired_compile(list(configs.values()))
    refuse_adapters_without_base(list(configs.values()))
    if study is None:
        return CheckPlan(name, every, _matching(every, steps))
    chosen = [step.slug for step in study.select(steps or base.study.steps)]
    if refused := [p for step, p in refused_steps(study, configs) if step.slug in chosen]:
        raise ConfigError(*dict.fromkeys(refused))
    return CheckPlan(study.name, every, []).only(chosen)


def _step(tree: KconfigTree, layers: Sequence[ConfigLayer], study: Study, step: Step) -> CheckCase:
    config, title, problems = None, step.title, tuple[Problem, ...]()
    try:
        variant, config = resolve_step(tree, layers, study, step)
        title = variant.title
    except ConfigError as error:
        problems = tuple(error.problems)
    return CheckCase(
        label=study.label(step),
        selector=str(study.number(step)),
        slug=step.slug,
        config=config,
        problems=problems,
        parent=step.parent,
        delta=step.set,
        params=step.params if step.parent else None,
        title=title,
    )


def _matching(every: Sequence[CheckCase], patterns: str) -> list[CheckCase]:
    """Return the cases selected by number, slug or pattern; all cases without patterns."""
    available, advice = ", ".join(case.slug for case in every), "type: make plan, to list the steps"
    chosen, problems = set[int](), []
    for pattern in patterns.replace(",", " ").split() or ["all"]:
        numbers = {
            i
            for i, case in enumerate(every)
            if pattern in ("all", str(i)) or fnmatch.fnmatchcase(case.slug, pattern)
        }
        chosen |= numbers
        if not numbers:
            what = f"{pattern!r} matches no step (available: {available})"
            problems.append(Problem(what, "STEPS", advice, code="usage.unknown-step"))
    if problems:
        raise ConfigError(*problems)
    return [every[i] for i in sorted(chosen)]
