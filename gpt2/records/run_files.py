"""``resolved_config.yaml``, the configuration stored in each run directory, and lookup of runs."""

import contextlib
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.records.trust import own_values, recorded_config, require_identity
from gpt2.study.arguments import RunLookup
from lib.config.dotconfig import ExplicitSetting
from lib.config.private import private_digests, without_private
from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.json_files import RecordError
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.units import first_of

SCHEMA_VERSION = 2
_SHIPPED = ("defconfig", "fragment")


def write_resolved_config(
    run: RunDir, config: Config, settings: Mapping[str, ExplicitSetting] | None = None
) -> None:
    """Write all symbol values, the run's identity, and the source of each non-default value.

    Private values are empty; their digests are under ``private_sha256``.

    The file contains JSON, which is valid YAML and needs no extra package. Raises ConfigError,
    without changing any file, if the directory belongs to a different run.
    """
    recorded = config.hash8
    with contextlib.suppress(RecordError):
        recorded = RunRecord(run).hash8
    if recorded != config.hash8:
        what = f"directory belongs to a different run (expected {config.hash8}, got {recorded})"
        advice = "move the directory aside, then type: make"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.foreign-directory"))
    values = without_private({name: each["value"] for name, each in (settings or {}).items()})
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "settings": {
            name: {**each, "value": values[name]} for name, each in (settings or {}).items()
        },
        "symbols": without_private(config.values),
        "private_sha256": private_digests(config.values),
    }
    write_json(run.resolved_config, record)


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return the non-default settings of a run.

    ``overrides`` maps symbols to values and sources; ``defconfig`` lists the sources that are files
    of this tree.
    """
    settings = RunRecord(run).settings
    files = {s["where"].partition(":")[0] for s in settings.values() if s["label"] in _SHIPPED}
    return {"defconfig": sorted(files), "overrides": settings}


def read_planned_config(run: RunDir) -> Config:
    """Load the configuration that the plan of this machine wrote, with the values of all symbols.

    Raises ConfigError like ``read_resolved_config``.
    """
    record = RunRecord(run)
    config = Config.from_values(record.symbols)
    require_identity(config, record)
    return config


def read_resolved_config(run: RunDir, build_dir: Path | None = None) -> Config:
    """Load the configuration of a run directory, which may be a stranger's.

    A symbol that ``gpt2.records.trust`` does not allow has the value of ``.config`` in ``build_dir``,
    or without ``build_dir`` its default. Raises ConfigError if the file is missing or unreadable, or
    if this code derives a different identity from the symbols than the code that wrote the file.
    """
    record = RunRecord(run)
    config = recorded_config(record, own_values(build_dir) if build_dir else None)
    require_identity(config, record)
    return config


_LIST_RUNS = "type: make plan, to list the runs"


def find_finished(
    named: str, build_dir: Path, lookup: RunLookup | None = None, *, variable: str = "RUN"
) -> RunDir:
    """Return the finished run ``named``: a directory, or a run name in the plan of ``.config``.

    ``variable`` is the make variable that contains the name. Raises ConfigError unless exactly one
    run matches, and is finished and not damaged.
    """
    if not named:
        what = "no run given"
        raise ConfigError(Problem(what, variable, _LIST_RUNS, code="usage.missing-argument"))
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        run = RunDir(_planned(named, build_dir, lookup or RunLookup(), variable))
    if problem := RunRecord(run).unfinished:
        raise ConfigError(problem)
    return run


def find_started(named: str, build_dir: Path, lookup: RunLookup) -> list[RunDir]:
    """Return all started runs that match ``named``, finished or not.

    ``named`` is a directory, or a list of directories, patterns over the paths of run directories
    and patterns over the plan's run names. Raises ConfigError if a directory is not a run's, a
    pattern matches no run, or none of the runs has been started.
    """
    words = [named] if Path(named).is_dir() else named.replace(",", " ").split()
    runs, patterns = [], []
    for word in words:
        if Path(word).is_dir():
            run = RunDir(Path(word))
            if not _is_run(run):
                what = f"{word!r} is not a run directory"
                raise ConfigError(Problem(what, "RUNS", _LIST_RUNS, code="run.not-found"))
            runs.append(run)
        elif matching := _run_directories(word):
            runs += matching
        else:
            patterns.append(word)
    if patterns:
        plan = lookup.plan(build_dir)
        runs += [RunDir(run.path) for run in plan.matching(",".join(patterns))]
    started = [run for run in runs if run.path.is_dir()]
    if not started:
        what = f"no started run matches {named!r}"
        raise ConfigError(Problem(what, "RUNS", _LIST_RUNS, code="run.not-found"))
    return started


def _is_run(run: RunDir) -> bool:
    """Return whether one of these files exists: a run without one of them is damaged."""
    return any(path.exists() for path in (run.status, run.resolved_config, run.manifest))


def _run_directories(pattern: str) -> list[RunDir]:
    """Return the run directories whose paths match ``pattern``, in order; names have no slash."""
    if "/" not in pattern:
        return []
    return [run for path in sorted(glob(pattern)) if _is_run(run := RunDir(Path(path)))]


def _planned(named: str, build_dir: Path, lookup: RunLookup, variable: str) -> Path:
    """Return the directory of the only planned run that matches ``named``."""
    plan = lookup.plan(build_dir)
    # A label contains a blank, which would split it into two patterns.
    runs = [run for run in plan.runs if named == run.label or run.matches(named)]
    if not runs:
        what = f"{named!r} is neither a run directory nor a run of {plan.study}"
        raise ConfigError(Problem(what, variable, _LIST_RUNS, code="run.not-found"))
    if len(runs) > 1:
        what = f"{named!r} matches {len(runs)} runs: {first_of([run.label for run in runs])}"
        raise ConfigError(
            Problem(what, variable, "select one of the runs, or set SEEDS=", code="run.ambiguous")
        )
    return runs[0].path
