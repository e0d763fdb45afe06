"""The directory of a finished run, as ``RUN=`` names it."""

from pathlib import Path

from gpt2.planning import config_layers, make_plan
from lib.errors import ConfigError, Problem
from lib.rundir import RunDir
from lib.status import State, read_status

_LIST = "type: make plan, which lists the runs"
_NAMED = 3


def find_finished(named: str, build_dir: Path, *, steps: str = "", seeds: str = "") -> RunDir:
    """The run that ``named`` is: a directory, or a name in the plan of ``.config``.

    ConfigError unless it is one run, and done.
    """
    if not named:
        raise ConfigError(Problem("names no run", "RUN", _LIST))
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        run = RunDir(_planned(named, build_dir, steps, seeds))
    status = read_status(run)
    if status is None:
        raise ConfigError(Problem("has not been trained", str(run.path), "type: make"))
    if status.state is not State.SUCCESS:
        what = f"is not finished: {status.state} at iteration {status.iteration:,}"
        raise ConfigError(Problem(what, str(run.path), "type: make, which goes on with it"))
    return run


def find_started(named: str, build_dir: Path, *, steps: str = "", seeds: str = "") -> list[RunDir]:
    """All runs that ``named`` names, trained or not to their end: a directory, or names in the plan.

    ConfigError where a name is none of a run, or of none that has begun.
    """
    if Path(named).is_dir():
        return [RunDir(Path(named))]
    words = named.replace(",", " ").split()
    found = [RunDir(Path(word)) for word in words if Path(word).is_dir()]
    if patterns := [word for word in words if not Path(word).is_dir()]:
        plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
        found += [RunDir(run.path) for run in plan.matching(",".join(patterns))]
    begun = [run for run in found if run.path.is_dir()]
    if not begun:
        raise ConfigError(Problem("names no run that has begun", "RUN", _LIST))
    return begun


def _planned(named: str, build_dir: Path, steps: str, seeds: str) -> Path:
    plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
    # A label has a blank in it, which would part two patterns.
    found = [run for run in plan.runs if named == run.label or run.matches(named)]
    if not found:
        what = f"{named!r} is neither a run's folder nor a run of {plan.study}"
        raise ConfigError(Problem(what, "RUN", _LIST))
    if len(found) > 1:
        labels = ", ".join(run.label for run in found[:_NAMED])
        what = f"{named!r} names {len(found)} runs: {labels}" + (", …" if found[_NAMED:] else "")
        raise ConfigError(Problem(what, "RUN", "name one of them, or SEEDS="))
    return found[0].path
