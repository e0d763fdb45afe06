"""Lookup of run directories by path or by run name (``RUN=``)."""

from pathlib import Path

from gpt2.planning import config_layers, make_plan
from lib.errors import ConfigError, Problem
from lib.rundir import RunDir
from lib.status import State, read_status

_LIST_RUNS = "type: make plan, to list the runs"
_MAX_NAMES_SHOWN = 3


def find_finished(named: str, build_dir: Path, *, steps: str = "", seeds: str = "") -> RunDir:
    """Return the finished run ``named``: a directory, or a run name in the plan of ``.config``.

    Raises ConfigError unless exactly one run matches and the run is finished.
    """
    if not named:
        raise ConfigError(Problem("no run given", "RUN", _LIST_RUNS, code="usage.missing-argument"))
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        run = RunDir(_planned(named, build_dir, steps, seeds))
    status = read_status(run)
    if status is None:
        what = "the run has not been trained"
        raise ConfigError(Problem(what, str(run.path), "type: make", code="run.not-found"))
    if status.state is not State.SUCCESS:
        what = f"the run is not finished: {status.state} at iteration {status.iteration:,}"
        advice = "type: make, to resume the run"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.not-finished"))
    return run


def find_started(named: str, build_dir: Path, *, steps: str = "", seeds: str = "") -> list[RunDir]:
    """Return all started runs that match ``named``, finished or not.

    ``named`` is a directory, or a list of directories and patterns over the plan's run names.
    Raises ConfigError if a pattern matches no run, or none of the runs has been started.
    """
    if Path(named).is_dir():
        return [RunDir(Path(named))]
    words = named.replace(",", " ").split()
    runs = [RunDir(Path(word)) for word in words if Path(word).is_dir()]
    if patterns := [word for word in words if not Path(word).is_dir()]:
        plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
        runs += [RunDir(run.path) for run in plan.matching(",".join(patterns))]
    started = [run for run in runs if run.path.is_dir()]
    if not started:
        what = f"no started run matches {named!r}"
        raise ConfigError(Problem(what, "RUN", _LIST_RUNS, code="run.not-found"))
    return started


def _planned(named: str, build_dir: Path, steps: str, seeds: str) -> Path:
    """Return the directory of the only planned run that matches ``named``."""
    plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
    # A label contains a blank, which would split it into two patterns.
    runs = [run for run in plan.runs if named == run.label or run.matches(named)]
    if not runs:
        what = f"{named!r} is neither a run directory nor a run of {plan.study}"
        raise ConfigError(Problem(what, "RUN", _LIST_RUNS, code="run.not-found"))
    if len(runs) > 1:
        labels = ", ".join(run.label for run in runs[:_MAX_NAMES_SHOWN])
        labels += ", …" if runs[_MAX_NAMES_SHOWN:] else ""
        what = f"{named!r} matches {len(runs)} runs: {labels}"
        raise ConfigError(
            Problem(what, "RUN", "select one of the runs, or set SEEDS=", code="run.ambiguous")
        )
    return runs[0].path
