"""From a configuration to its runs: one training, the steps of a study, a matrix, a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2 import combinations
from gpt2.ablation import STUDIES
from gpt2.ablation.resolve import resolve_config, resolve_study
from gpt2.combinations import Sweep
from gpt2.config import Config
from gpt2.rules import refuse_lone_arms, wants_twins
from lib.binding import Value
from lib.designs.axes import slug
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree, defconfig_layers, read_config
from lib.kconfig.place import Place
from lib.plan import Run, Variant, parse_seeds, plan_runs
from lib.project import ROOT

# Taken by train_ra_mla.py and by checks where there is no .config.
STUDY_DEFCONFIG = "gpt2-ratio-ablation"

# The arm of runs without torch.compile that stand beside those with it, and the end of their slugs.
EAGER = "eager"

Block = Sequence[tuple[Variant, Config]]


@dataclass(frozen=True)
class Plan:
    """All runs that a configuration asks for, in the order they are trained."""

    study: str
    # Folder of the study's run directories and tables.
    folder: Path
    build_dir: Path
    # The configuration itself, without any step's changes.
    base: Config
    runs: Sequence[Run[Config]]
    # Combinations of a matrix or a sweep that the configuration does not allow.
    left_out: Sequence[Problem] = ()
    # What was asked for instead of the configuration's own runs.
    sweep: Sweep | None = None

    def only(self, patterns: str) -> "Plan":
        """This plan with the runs that ``patterns`` name; all of them where it names none."""
        return replace(self, runs=self.matching(patterns)) if patterns else self

    def matching(self, patterns: str) -> list[Run[Config]]:
        """The runs that comma-separated shell patterns name. ConfigError when one names none."""
        words = patterns.replace(",", " ").split()
        unmatched = [word for word in words if not any(run.matches(word) for run in self.runs)]
        if unmatched or not words:
            what = f"{' '.join(unmatched) or 'nothing'!r} names no run of {self.study}"
            raise ConfigError(Problem(what, "RUNS", "type: make plan, which lists them"))
        return [run for run in self.runs if any(run.matches(word) for word in words)]


def config_layers(build_dir: Path) -> list[Layer]:
    """The layers of the build folder's ``.config``. ConfigError when there is none."""
    return [read_config(Place(ROOT, build_dir).config)]


def step_layers(build_dir: Path, settings: Sequence[Layer]) -> list[Layer]:
    """``.config``, or the study's own defconfig where there is none, turned into the study."""
    config = Place(ROOT, build_dir).config
    base = [read_config(config)] if config.exists() else defconfig_layers(ROOT, STUDY_DEFCONFIG)
    study = Layer.of("command line", "--ra-mla-ablation-step", {"RA_MLA_ABLATION_MODE": True})
    return [*base, study, *settings]


def make_plan(
    layers: Sequence[Layer],
    build_dir: Path,
    *,
    steps: str = "",
    seeds: str = "",
    sweep: Sweep | None = None,
    yes: bool = False,
) -> Plan:
    """Plan the runs of a configuration; ``steps``, ``seeds`` and ``sweep`` override its own.

    Raises ConfigError with every problem of every step at once. Asks before it plans very many,
    unless ``yes``. Writes nothing; of results it reads only which runs are done.
    """
    tree = Tree()
    base = resolve_config(tree, layers)
    chosen = parse_seeds(seeds) or base.study.seed_list or (base.seed,)
    if len(set(chosen)) < len(chosen):
        raise ConfigError(Problem("a seed stands twice", "SEED_LIST"))
    if steps and (sweep is not None or base.study.mode != "ra_mla_ablation_mode"):
        advice = "type: make defconfig-gpt2-ratio-ablation, or set RA_MLA_ABLATION_MODE=y"
        raise ConfigError(Problem("the configuration is no ablation study", "STEPS", advice))
    left_out: Sequence[Problem] = ()
    blocks: dict[int, Block] = {}
    for seed in chosen:
        seeded = [*layers, Layer.of("command line", "SEEDS", {"SEED": seed})]
        if sweep is not None:
            combined = combinations.sweep(tree, seeded, base, sweep, yes=yes)
            study, blocks[seed], left_out = "sweep", combined.block, combined.left_out
        elif base.study.mode == "ra_mla_ablation_mode":
            study, blocks[seed] = base.study.study, _steps(tree, seeded, base, steps)
        elif base.study.mode == "test_matrix_mode":
            combined = combinations.matrix(tree, seeded, base, yes=yes)
            study, blocks[seed], left_out = "matrix", combined.block, combined.left_out
        else:
            study, blocks[seed] = "single", [(Variant("run"), resolve_config(tree, seeded))]
    # A sweep looks for settings: what the compiler does to each is asked once they are found.
    if sweep is None:
        blocks = {seed: _with_twins(block) for seed, block in blocks.items()}
    refuse_lone_arms([config for block in blocks.values() for _, config in block])
    output = build_dir / base.study.output_dir
    runs = plan_runs(study, output, blocks)
    return Plan(study, output / study, build_dir, base, runs, left_out, sweep)


def make_trial(layers: Sequence[Layer], build_dir: Path, change: Layer, iterations: int) -> Plan:
    """Two short runs: the configuration, and the same with ``change``; kept apart from studies.

    ConfigError when the change does not take, or changes nothing that a result depends on.
    """
    tree = Tree()
    base = resolve_config(tree, layers)
    # A warm-up longer than the run would leave nothing to compare.
    warm_up = min(base.schedule.warmup_steps, max(1, iterations // 10))
    short: dict[str, Value] = {
        "SINGLE_TRAINING": True,
        "BUDGET_ITERATIONS": True,
        "MAX_ITERS": iterations,
        "WARMUP_STEPS": warm_up,
    }
    layers = [*layers, Layer.of("command line", "ITERS", short)]
    delta: dict[str, Value] = {a.name: a.value for a in change.assignments}
    name = slug("-".join(f"{a.name}-{a.value}" for a in change.assignments).removesuffix("-y"))
    block = [
        (Variant("base"), resolve_config(tree, layers)),
        (Variant(name, parent="base", delta=delta), resolve_config(tree, [*layers, change])),
    ]
    refuse_lone_arms([config for _, config in block])
    output = build_dir / base.study.output_dir
    runs = plan_runs("try", output, {base.seed: block})
    return Plan("try", output / "try", build_dir, base, runs)


def table_plan(plan: Plan, layers: Sequence[Layer]) -> Plan:
    """The runs that a table of ``plan`` shows: its own, and the rest of its study that has begun.

    A table of the steps that were just chosen would otherwise replace that of the whole study.
    """
    configured = plan.base.study.seed_list or (plan.base.seed,)
    seeds = dict.fromkeys((*configured, *(run.seed for run in plan.runs)))
    is_study = plan.sweep is None and plan.base.study.mode == "ra_mla_ablation_mode"
    steps = "all" if is_study else ""
    named = ",".join(map(str, seeds))
    whole = make_plan(layers, plan.build_dir, steps=steps, seeds=named, sweep=plan.sweep, yes=True)
    own = {run.path for run in plan.runs}
    return replace(whole, runs=[r for r in whole.runs if r.path in own or r.path.exists()])


def _steps(tree: Tree, layers: Sequence[Layer], base: Config, steps: str) -> Block:
    """The chosen steps; all are resolved, because a defect of one is a defect of the study."""
    study = STUDIES[base.study.study]
    chosen = study.select(steps or base.study.steps)
    return [
        (
            Variant(s.step.slug, s.step.title, study.number(s.step), s.step.parent, s.step.set),
            s.config,
        )
        for s in resolve_study(tree, layers, study)
        if s.step in chosen
    ]


def _with_twins(block: Block) -> Block:
    """``block``, and behind it the same runs without torch.compile where it wants them.

    A twin has neither number nor levels: those name the configured runs, and marginal means are theirs.
    """
    if not wants_twins([config for _, config in block]):
        return block
    eager = [(_eager_twin(variant), _without_compiler(config)) for variant, config in block]
    return [*((replace(variant, arm="compiled"), config) for variant, config in block), *eager]


def _eager_twin(variant: Variant) -> Variant:
    parent = variant.parent and f"{variant.parent}-{EAGER}"
    slug, title = f"{variant.slug}-{EAGER}", f"{variant.title}, {EAGER}".removeprefix(", ")
    apart = {"number": None, "levels": None, "arm": EAGER}
    return replace(variant, slug=slug, title=title, parent=parent, **apart)


def _without_compiler(config: Config) -> Config:
    off: dict[str, Value] = {"COMPILE": False, "COMPILE_EAGER_TWIN": False}
    return Config.from_values({**config.values, **off})
