"""The directory of a finished run, as ``RUN=`` names it."""

from pathlib import Path

from gpt2.planning import config_layers, make_plan
from lib.errors import ConfigError, Problem
from lib.rundir import RunDir
from lib.status import State, read_status


def find_finished(named: str, build_dir: Path, *, steps: str = "", seeds: str = "") -> RunDir:
    """The run that ``named`` is: a directory, or a name in the plan of ``.config``.

    ConfigError unless it is one run, and done.
    """
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
        # A label has a blank in it, which would part two patterns.
        found = [r for r in plan.runs if r.label == named] or plan.matching(named)
        if len(found) > 1:
            labels = ", ".join(r.label for r in found)
            raise ConfigError(Problem(f"{named!r} names {len(found)} runs: {labels}", "RUN"))
        run = RunDir(found[0].path)
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        state = "has not started" if status is None else f"is {status.state}"
        raise ConfigError(Problem(f"the run {state}, not done", str(run.path), "type: make"))
    return run
