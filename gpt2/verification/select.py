"""Selection of the runs to verify, and the symbols in which their study declares them to differ."""

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
    """Return ``plan`` with every step of its study.

    All steps are needed because a step's declared differences include those of its ancestors.
    """
    is_study = plan.sweep is None and plan.base.study.mode == "ra_mla_ablation_mode"
    seeds = ",".join(dict.fromkeys(str(run.seed) for run in plan.runs))
    steps = "all" if is_study else ""
    return make_plan(layers, plan.build_dir, steps=steps, seeds=seeds, sweep=plan.sweep, yes=True)


def chosen_runs(plan: Plan, study: Plan, named: str) -> list[RunDir]:
    """Return the finished runs of ``plan``, or the runs selected by ``named``.

    ``named`` lists directories or patterns over run names. Skipped runs are logged. Raises
    ConfigError if an item matches no run of ``study`` or selects an unfinished run.
    """
    paths: dict[Path, None] = {}
    for word in words(named):
        folders = [Path(name) for name in sorted(glob(word)) if ".old-" not in name]
        folders = [path for path in folders if RunDir(path).resolved_config.exists()]
        paths |= dict.fromkeys(folders or [run.path for run in study.matching(word)])
    runs = [RunDir(path) for path in paths or [run.path for run in plan.runs]]
    unfinished = {run.path.name: state for run in runs if (state := _unfinished(run))}
    if named and unfinished:
        raise ConfigError(
            *(
                Problem(f"run is {state}", name, code="run.not-finished")
                for name, state in unfinished.items()
            )
        )
    _log_skipped(unfinished)
    finished = [run for run in runs if run.path.name not in unfinished]
    if not finished:
        what = "no run is finished"
        raise ConfigError(Problem(what, plan.study, "type: make", code="run.not-finished"))
    return finished


def declared_axes(study: Plan, runs: Sequence[RunDir], named: str) -> dict[Path, Set[str]]:
    """Return {run directory: symbols in which the run may differ}.

    The symbols are those set by the run's step and its ancestors, plus those in ``named``. A
    directory outside the plan declares none. ``study`` must contain every step.
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
    # Replace a member of a choice by the choice: OPTIMIZER_SGD by OPTIMIZER.
    choices = {f"{name}_{value}".upper(): name for name, value in run.config.values.items()}
    variant = variants.get(run.variant.slug)
    while variant is not None:
        symbols |= {choices.get(name, name) for name in variant.delta or ()}
        variant = variants.get(variant.parent)
    return symbols


def _log_skipped(unfinished: Mapping[str, str]) -> None:
    started = {name: state for name, state in unfinished.items() if state != _NOT_STARTED}
    for name, state in started.items():
        say("SKIP", f"{name} is {state}")
    if rest := len(unfinished) - len(started):
        say("SKIP", f"{rest} runs of the study are {_NOT_STARTED}")


def _unfinished(run: RunDir) -> str:
    """Return the state of an unfinished run; "" if the run is finished."""
    status = read_status(run)
    if status is None:
        return _NOT_STARTED
    return "" if status.state is State.SUCCESS else status.state.lower()
