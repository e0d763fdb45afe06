"""From a study and a configuration to one Config for each step, or all reasons why not."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt2.ablation.step import Step, Study
from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.kconfig import Layer, Tree


@dataclass(frozen=True)
class ResolvedStep:
    """A step, and the configuration that the base and the deltas on the way to it add up to."""

    step: Step
    config: Config


def step_layers(study: Study, step: Step) -> list[Layer]:
    """One layer for each delta from the baseline down to ``step``."""
    return [Layer.of("step", f"step {study.label(s)}", s.set) for s in study.lineage(step) if s.set]


def resolve_step(tree: Tree, base: Sequence[Layer], study: Study, step: Step) -> Config:
    """The configuration of ``step`` on the layers of ``base``.

    Raises ConfigError naming the step: an assignment that does not take, a broken rule.
    """
    try:
        return resolve_config(tree, [*base, *step_layers(study, step)])
    except ConfigError as error:
        raise _named(study, step, error) from None


def resolve_config(tree: Tree, layers: Sequence[Layer]) -> Config:
    """The configuration of ``layers``. ConfigError points at the lines that broke a rule."""
    return tree.checked(layers, Config.from_values)[1]


def resolve_study(tree: Tree, base: Sequence[Layer], study: Study) -> list[ResolvedStep]:
    """Every step of the study, in order.

    Raises ConfigError with all steps that do not resolve, that come out the same as another, or
    whose parameter count breaks what they declare.
    """
    found, problems = [], []
    for step in study.steps:
        try:
            found.append(ResolvedStep(step, resolve_step(tree, base, study, step)))
        except ConfigError as error:
            problems.extend(error.problems)
    # A defect of the base shows in every step: once is enough.
    problems = list(dict.fromkeys(problems)) or [*_twins(study, found), *_sizes(study, found)]
    if problems:
        raise ConfigError(*problems)
    return found


def _named(study: Study, step: Step, error: ConfigError) -> ConfigError:
    """The same problems, those without a place at the step."""
    place = f"step {study.label(step)}"
    return ConfigError(*(p if p.where else Problem(p.what, place, p.next) for p in error.problems))


def _twins(study: Study, resolved: Sequence[ResolvedStep]) -> list[Problem]:
    """Steps that resolve to what an earlier one resolves to."""
    first: dict[str, Step] = {}
    problems = []
    for found in resolved:
        identity = canonical_json(found.config.identity())
        twin = first.setdefault(identity, found.step)
        if twin is not found.step:
            what = f"resolves to the same configuration as {study.label(twin)}"
            problems.append(Problem(what, f"step {study.label(found.step)}"))
    return problems


def _sizes(study: Study, resolved: Sequence[ResolvedStep]) -> list[Problem]:
    """Steps whose parameters differ from their parent's by more than they declare."""
    params = {found.step.slug: found.config.model.num_params() for found in resolved}
    problems = []
    for step in study.steps[1:]:
        change = params[step.slug] / params[step.parent] - 1
        low, high = step.params
        if not low <= change <= high:
            what = (
                f"parameters {params[step.slug]:,} against {params[step.parent]:,} of "
                f"{step.parent} ({change:+.1%}), the step declares {low:+.1%} to {high:+.1%}"
            )
            problems.append(Problem(what, f"step {study.label(step)}"))
    return problems
