"""Resolution of a study: one Config for each step on top of a base configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt2.ablation.step import Step, Study
from gpt2.config import Config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.files import canonical_json


@dataclass(frozen=True)
class ResolvedStep:
    """A step and its configuration: the base plus the changes of all steps in its lineage."""

    step: Step
    config: Config


def step_layers(study: Study, step: Step) -> list[ConfigLayer]:
    """Return one layer for each step with changes, from the baseline down to ``step``."""
    return [
        ConfigLayer.of("step", f"step {study.label(s)}", s.set)
        for s in study.lineage(step)
        if s.set
    ]


def resolve_step(
    tree: KconfigTree, base: Sequence[ConfigLayer], study: Study, step: Step
) -> Config:
    """Return the configuration of ``step`` on top of the layers of ``base``.

    Raises ConfigError located at the step if an assignment has no effect or a rule is broken.
    """
    try:
        return resolve_config(tree, [*base, *step_layers(study, step)])
    except ConfigError as error:
        raise _located_at_step(study, step, error) from None


def resolve_config(tree: KconfigTree, layers: Sequence[ConfigLayer]) -> Config:
    """Return the configuration of ``layers``.

    Raises ConfigError located at the lines that break a rule.
    """
    return tree.checked(layers, Config.from_values)[1]


def resolve_study(
    tree: KconfigTree, base: Sequence[ConfigLayer], study: Study
) -> list[ResolvedStep]:
    """Return every step of the study with its configuration, in order.

    Raises ConfigError with all steps that do not resolve, that resolve to the same configuration as
    another step, or whose parameter count is outside the declared range.
    """
    resolved: list[ResolvedStep] = []
    problems: list[Problem] = []
    for step in study.steps:
        try:
            resolved.append(ResolvedStep(step, resolve_step(tree, base, study, step)))
        except ConfigError as error:
            problems.extend(error.problems)
    # A defect of the base appears in every step: report it once.
    problems = list(dict.fromkeys(problems))
    problems = problems or [*_duplicates(study, resolved), *_size_problems(study, resolved)]
    if problems:
        raise ConfigError(*problems)
    return resolved


def _located_at_step(study: Study, step: Step, error: ConfigError) -> ConfigError:
    """Return ``error`` with the step as the location of every problem that has no location."""
    where = f"step {study.label(step)}"
    return ConfigError(*(p if p.where else replace(p, where=where) for p in error.problems))


def _duplicates(study: Study, resolved: Sequence[ResolvedStep]) -> list[Problem]:
    """Return a problem for each step with the same configuration as an earlier step."""
    first: dict[str, Step] = {}
    problems = []
    for current in resolved:
        identity = canonical_json(current.config.identity())
        earlier = first.setdefault(identity, current.step)
        if earlier is not current.step:
            what = f"resolves to the same configuration as {study.label(earlier)}"
            where = f"step {study.label(current.step)}"
            problems.append(Problem(what, where, code="study.duplicate-step"))
    return problems


def _size_problems(study: Study, resolved: Sequence[ResolvedStep]) -> list[Problem]:
    """Return a problem for each step whose size change against its parent is undeclared."""
    params = {current.step.slug: current.config.model.num_params() for current in resolved}
    problems = []
    for step in study.steps[1:]:
        change = params[step.slug] / params[step.parent] - 1
        low, high = step.params
        if not low <= change <= high:
            what = (
                f"{params[step.slug]:,} parameters, {step.parent} has {params[step.parent]:,} "
                f"(expected a change of {low:+.1%} to {high:+.1%}, got {change:+.1%})"
            )
            where = f"step {study.label(step)}"
            problems.append(Problem(what, where, code="study.size-out-of-range"))
    return problems
