"""Which runs are verified, and in what their study declares them to differ."""

from collections.abc import Mapping, Sequence, Set
from glob import glob
from pathlib import Path
from typing import Any

from gpt2.comparison import words
from gpt2.planning import Plan, make_plan
from lib.console import say
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer
from lib.plan import Run, Variant
from lib.rundir import RunDir
from lib.status import State, read_status

_NOT_STARTED = "not started"


def whole_study(plan: Plan, layers: Sequence[Layer]) -> Plan:
    """``plan`` with every step of its study: a step is declared by those that it is built on."""
    is_study = plan.sweep is None and plan.base.study.mode == "ra_mla_ablation_mode"
    seeds = ",".join(dict.fromkeys(str(run.seed) for run in plan.runs))
    steps = "all" if is_study else ""
    return make_plan(layers, plan.build_dir, steps=steps, seeds=seeds, sweep=plan.sweep, yes=True)


def chosen_runs(plan: Plan, study: Plan, named: str) -> list[RunDir]:
    """The finished runs of ``plan``, or those that ``named`` names: directories or patterns.

    What is left out is said. ConfigError where a word names no run of ``study``, or one that is not
    finished.
    """
    found: dict[Path, None] = {}
    for word in words(named):
        folders = [Path(name) for name in sorted(glob(word)) if ".old-" not in name]
        folders = [path for path in folders if RunDir(path).resolved_config.exists()]
        found |= dict.fromkeys(folders or [run.path for run in study.matching(word)])
    runs = [RunDir(path) for path in found or [run.path for run in plan.runs]]
    unfinished = {run.path.name: why for run in runs if (why := _unfinished(run))}
    if named and unfinished:
        raise ConfigError(*(Problem(f"is {why}", name) for name, why in unfinished.items()))
    _say_left_out(unfinished)
    done = [run for run in runs if run.path.name not in unfinished]
    if not done:
        raise ConfigError(Problem("no run is finished", plan.study, "type: make"))
    return done


def declared_axes(study: Plan, runs: Sequence[RunDir], named: str) -> dict[Path, Set[str]]:
    """Run → the symbols that its step and the steps on the way to it set, and those ``named``.

    A directory that the plan does not know declares nothing. ``study`` has every step.
    """
    variants = {run.variant.slug: run.variant for run in study.runs}
    planned = {run.path.resolve(): run for run in study.runs}
    return {
        run.path: _axis(planned.get(run.path.resolve()), variants) | set(words(named))
        for run in runs
    }


def _axis(run: Run[Any] | None, variants: Mapping[str, Variant]) -> set[str]:
    if run is None:
        return set()
    symbols: set[str] = set()
    # A member of a choice stands for it: OPTIMIZER_SGD for OPTIMIZER.
    choices = {f"{name}_{value}".upper(): name for name, value in run.config.values.items()}
    variant = variants.get(run.variant.slug)
    while variant is not None:
        symbols |= {choices.get(name, name) for name in variant.delta or ()}
        variant = variants.get(variant.parent)
    return symbols


def _say_left_out(unfinished: Mapping[str, str]) -> None:
    begun = {name: why for name, why in unfinished.items() if why != _NOT_STARTED}
    for name, why in begun.items():
        say("SKIP", f"{name} is {why}, and left out")
    if rest := len(unfinished) - len(begun):
        say("SKIP", f"{rest} runs of the study are {_NOT_STARTED}")


def _unfinished(run: RunDir) -> str:
    status = read_status(run)
    if status is None:
        return _NOT_STARTED
    return "" if status.state is State.SUCCESS else status.state.lower()
