"""``resolved_config.yaml``, the configuration stored in each run directory, and lookup of runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.planning.plan import config_layers, make_plan
from lib.config.dotconfig import ExplicitSetting
from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.json_files import RecordError
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, State, read_status

SCHEMA_VERSION = 2
_SHIPPED = ("defconfig", "fragment")


def write_resolved_config(
    run: RunDir, config: Config, settings: Mapping[str, ExplicitSetting] | None = None
) -> None:
    """Write all symbol values, the run's identity, and the source of each non-default value.

    The file contains JSON, which is valid YAML and needs no extra package. Raises ConfigError,
    without changing any file, if the directory belongs to a different run.
    """
    if (recorded := _hash8(run)) not in (None, config.hash8):
        what = f"directory belongs to a different run (expected {config.hash8}, got {recorded})"
        advice = "move the directory aside, then type: make"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.foreign-directory"))
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "settings": dict(settings or {}),
        "symbols": dict(config.values),
    }
    write_json(run.resolved_config, record)


def _hash8(run: RunDir) -> str | None:
    """Return the hash of the run in the directory; None if there is no readable record."""
    try:
        return RunRecord(run).config.hash8
    except RecordError:
        return None


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return the non-default settings of a run.

    ``overrides`` maps symbols to values and sources; ``defconfig`` lists the sources that are files
    of this tree.
    """
    settings = RunRecord(run).config.settings
    files = {s["where"].partition(":")[0] for s in settings.values() if s["label"] in _SHIPPED}
    return {"defconfig": sorted(files), "overrides": settings}


def read_resolved_config(run: RunDir) -> Config:
    """Load the configuration of a run directory.

    Raises ConfigError if the file is missing or unreadable, or if this code derives a different
    identity from the symbols than the code that wrote the file.
    """
    where = str(run.resolved_config)
    record = RunRecord(run).config
    symbols, written = record.symbols, record.hash8
    config = Config.from_values(symbols)
    if config.hash8 != written:
        raise ConfigError(
            Problem(
                f"made by other code (recorded identity {written}, now {config.hash8})",
                where,
                "type: make, to plan the runs of this code",
                code="run.other-code",
            )
        )
    return config


_LIST_RUNS = "type: make plan, to list the runs"
_MAX_NAMES_SHOWN = 3


def find_finished(
    named: str, build_dir: Path, *, steps: str = "", seeds: str = "", variable: str = "RUN"
) -> RunDir:
    """Return the finished run ``named``: a directory, or a run name in the plan of ``.config``.

    ``variable`` is the make variable that contains the name. Raises ConfigError unless exactly one
    run matches and the run is finished.
    """
    if not named:
        problem = Problem("no run given", variable, _LIST_RUNS, code="usage.missing-argument")
        raise ConfigError(problem)
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        run = RunDir(_planned(named, build_dir, steps, seeds, variable))
    status = read_status(run)
    if status is None:
        what = "the run has not been trained"
        raise ConfigError(Problem(what, str(run.path), "type: make", code="run.not-found"))
    if status.state is State.DAMAGED:
        advice = "to train the run again (the old folder is kept), type: make rerun RUNS=NAME"
        raise ConfigError(Problem(status.message, str(run.path), advice, code="run.damaged"))
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
        raise ConfigError(Problem(what, "RUNS", _LIST_RUNS, code="run.not-found"))
    return started


def _planned(named: str, build_dir: Path, steps: str, seeds: str, variable: str) -> Path:
    """Return the directory of the only planned run that matches ``named``."""
    plan = make_plan(config_layers(build_dir), build_dir, steps=steps, seeds=seeds)
    # A label contains a blank, which would split it into two patterns.
    runs = [run for run in plan.runs if named == run.label or run.matches(named)]
    if not runs:
        what = f"{named!r} is neither a run directory nor a run of {plan.study}"
        raise ConfigError(Problem(what, variable, _LIST_RUNS, code="run.not-found"))
    if len(runs) > 1:
        labels = ", ".join(run.label for run in runs[:_MAX_NAMES_SHOWN])
        labels += ", …" if runs[_MAX_NAMES_SHOWN:] else ""
        what = f"{named!r} matches {len(runs)} runs: {labels}"
        raise ConfigError(
            Problem(what, variable, "select one of the runs, or set SEEDS=", code="run.ambiguous")
        )
    return runs[0].path
