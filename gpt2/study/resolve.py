"""Resolution of a study: one Config for each step on top of a base configuration."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gpt2.config import Config, StudyConfig
from gpt2.study.judgeable import unjudgeable
from gpt2.study.step import Step, Study, filled_title
from lib.config.field import SymbolValue, kconfig_fields
from lib.config.layers import Assignment, ConfigLayer, to_kconfig_text
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.runs.run import RunVariant

# A variant and its configuration: of a step, the base plus the changes of its lineage.
Resolved = tuple[RunVariant, Config]


def step_layers(study: Study, step: Step) -> list[ConfigLayer]:
    """Return one layer for each step with changes, from the baseline down to ``step``."""
    return [
        ConfigLayer(
            "step",
            tuple(
                Assignment(name, to_kconfig_text(value), study.where(s, name))
                for name, value in s.set.items()
            ),
        )
        for s in study.lineage(step)
        if s.set
    ]


def resolve_step(
    tree: KconfigTree, base: Sequence[ConfigLayer], study: Study, step: Step
) -> Resolved:
    """Resolve ``step`` on top of the layers of ``base``.

    Raises ConfigError located at the step if an assignment has no effect, a rule is broken, or its
    title has an unknown field.
    """
    of_plan = {"SEED", *(field.metadata["symbol"] for field in kconfig_fields(StudyConfig))}
    problems = []
    for name in step.set:
        symbol = tree.kconf.syms.get(name)
        choice = symbol.choice.name if symbol and symbol.choice else ""
        if {name, choice} & of_plan:
            what = f"{name}: selects the runs of all steps (expected a setting of one training)"
            problems.append(Problem(what, study.where(step, name), code="study.plan-setting"))
    if problems:
        raise ConfigError(*problems)
    key = ""
    try:
        config = resolve_config(tree, [*base, *step_layers(study, step)])
        key = "title"
        values = {name: value for name, value in config.values.items() if tree.applies(name)}
        title = filled_title(step.title, values)
    except ConfigError as error:
        where = study.where(step, key)
        raise ConfigError(
            *(p if p.where else replace(p, where=where) for p in error.problems)
        ) from None
    return RunVariant(step.slug, title, study.number(step), step.parent, step.set), config


def resolve_config(tree: KconfigTree, layers: Sequence[ConfigLayer]) -> Config:
    """Return the configuration of ``layers``.

    Raises ConfigError located at the lines that break a rule, or leave the micro-batch open.
    """
    return tree.checked(layers, runnable_config)[1]


def runnable_config(values: Mapping[str, SymbolValue]) -> Config:
    """Return the configuration of ``values``. Raises ConfigError if it cannot be trained as it is."""
    config = Config.from_values(values)
    if not config.train.batch_size:
        what = "BATCH_SIZE: 0 is for the runs of a plan together (expected 1 or more here)"
        advice = "type: make plan, to see the number; then add SET=BATCH_SIZE=n"
        raise ConfigError(Problem(what, next=advice, code="config.conflict"))
    return config


def resolve_study(
    tree: KconfigTree, base: Sequence[ConfigLayer], study: Study, required: Collection[Step]
) -> tuple[list[Resolved], list[Problem]]:
    """Return the steps that resolve, in order, and the first problem of each other step.

    Raises ConfigError with the problems of the ``required`` steps: they do not resolve, resolve to the
    configuration of another step, have another size than they declare, or are refused.
    """
    block: list[Resolved] = []
    problems: list[tuple[Step, Problem]] = []
    for step in study.steps:
        try:
            block.append(resolve_step(tree, base, study, step))
        except ConfigError as error:
            problems += ((step, problem) for problem in error.problems)
    if not any(step in required for step, _ in problems):
        configs = {variant.slug: config for variant, config in block}
        problems += [*_duplicates(study, configs), *_size_problems(study, configs)]
        problems += refused_steps(study, configs)
    # A defect of the base appears in every step: report it once.
    fatal = list(dict.fromkeys(problem for step, problem in problems if step in required))
    if fatal:
        raise ConfigError(*fatal)
    first = {step.slug: (step, problem) for step, problem in reversed(problems)}
    left_out = [
        replace(problem, where=f"{study.number(step):02d}-{step.slug}", next="")
        for step, problem in reversed(first.values())
    ]
    return [each for each in block if each[0].slug not in first], left_out


def refused_steps(study: Study, configs: Mapping[str, Config]) -> Iterator[tuple[Step, Problem]]:
    """Yield each step that cannot be part of the study, and the reason."""
    baseline = study.steps[0].slug
    for slug, problem in unjudgeable(configs, baseline, study):
        yield study.step(slug), problem
    if baseline in configs and configs[baseline].model.mlp.sizing == "params":
        other = [slug for slug, config in configs.items() if config.model.mlp.sizing != "params"]
        what = (
            f"MLP_SIZING_PARAMS: {len(other)} of {len(study.steps)} steps set MLP_SIZING themselves "
            f"and would not have the parameters of the others (got {', '.join(other)})"
        )
        same = ",".join(slug for slug in configs if slug not in other)
        advice = f"type: make STEPS={same}, or leave MLP_SIZING_PARAMS to the steps of a study"
        for slug in other:
            yield (
                study.step(slug),
                Problem(what, f"study {study.name}", advice, code="study.unequal-parameters"),
            )


def _duplicates(study: Study, configs: Mapping[str, Config]) -> Iterator[tuple[Step, Problem]]:
    """Yield a problem for each step with the same configuration as an earlier step."""
    first: dict[str, str] = {}
    for slug, config in configs.items():
        earlier = first.setdefault(canonical_json(config.identity()), slug)
        if earlier != slug:
            step = study.step(slug)
            what = f"resolves to the same configuration as {study.label(study.step(earlier))}"
            yield step, Problem(what, study.where(step), code="study.duplicate-step")


def _size_problems(study: Study, configs: Mapping[str, Config]) -> Iterator[tuple[Step, Problem]]:
    """Yield a problem for each step whose size change against its parent is undeclared."""
    params = {slug: config.model.num_params() for slug, config in configs.items()}
    for step in study.steps[1:]:
        if step.slug not in params or step.parent not in params:
            continue
        change = params[step.slug] / params[step.parent] - 1
        low, high = step.params
        if not low <= change <= high:
            what = (
                f"{params[step.slug]:,} parameters, {step.parent} has {params[step.parent]:,} "
                f"(expected a change of {low:+.1%} to {high:+.1%}, got {change:+.1%})"
            )
            yield step, Problem(what, study.where(step), code="study.size-out-of-range")
