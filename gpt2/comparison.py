"""Comparing run directories by the symbols that made them; imports no torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from gpt2.attention import PATTERNS, PROJECTIONS
from gpt2.config import Config
from gpt2.finished import find_finished
from gpt2.planning import config_layers, make_plan
from gpt2.positions import POSITIONS
from gpt2.runs import read_resolved_config
from lib.analysis.finalists import Report, judge_finalists
from lib.compare.facts import read_facts
from lib.compare.verdict import Comparison, judge
from lib.errors import ConfigError, Problem
from lib.optim import OPTIMIZERS
from lib.pruning import PRUNERS
from lib.rundir import RunDir

# Path of a part that a choice selects → the choice.
_CHOICES = {
    "model.attention.pattern": PATTERNS.choice,
    "model.attention.positions": POSITIONS.choice,
    "model.attention.projection": PROJECTIONS.choice,
    "optimizer": OPTIMIZERS.choice,
    "pruning": PRUNERS.choice,
}


def compare(
    a: str, b: str, build_dir: Path, axis: str = "", label_by: str = "", **selection: str
) -> Comparison:
    """Compare the finished runs ``a`` and ``b``, each a directory or a name of .config's plan.

    ``axis`` and ``label_by`` are comma-separated symbols or fields. ConfigError where one names
    nothing, or a run is not there or not done.
    """
    for value, name in ((a, "A"), (b, "B")):
        if not value:
            raise ConfigError(Problem("names no run", name, "type: make compare A=DIR B=DIR"))
    left, right = (find_finished(name, build_dir, **selection) for name in (a, b))
    facts = read_facts(left), read_facts(right)
    return judge(*facts, names_of([left, right]), words(axis), words(label_by))


def finalists(named: str, build_dir: Path, **selection: str) -> Report:
    """Judge the finalists that ``named`` lists: directories or patterns of them, or of .config's plan.

    ConfigError where a word names no run.
    """
    runs: dict[Path, None] = {}
    for word in words(named):
        runs |= dict.fromkeys(_named(word, build_dir, **selection))
    found = [RunDir(path) for path in runs]
    return judge_finalists(found, names_of(found))


def _named(word: str, build_dir: Path, **selection: str) -> list[Path]:
    folders = [Path(name) for name in sorted(glob(word)) if ".old-" not in name]
    if found := [path for path in folders if RunDir(path).resolved_config.exists()]:
        return found
    plan = make_plan(config_layers(build_dir), build_dir, **selection)
    return [run.path for run in plan.matching(word)]


def words(text: str) -> list[str]:
    """What a comma-separated list holds."""
    return text.replace(",", " ").split()


def names_of(runs: Sequence[RunDir]) -> dict[str, str]:
    """Path of a setting → its symbol; empty where this code cannot read one of the runs."""
    names: dict[str, str] = {}
    try:
        for run in runs:
            names |= symbol_names(read_resolved_config(run))
    except ConfigError:
        return {}
    return names


def symbol_names(config: Config) -> dict[str, str]:
    """Path of each of the identity's settings → the symbol that it holds."""
    return _names(config, "")


def _names(value: Any, path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in dataclasses.fields(value):
        if not field.metadata.get("identity", True):
            continue
        below = f"{path}.{field.name}" if path else field.name
        content = vars(value)[field.name]
        if "symbol" in field.metadata:
            found[below] = field.metadata["symbol"]
        elif isinstance(content, tuple):
            for part in content:
                # A part that may be left out is selected by the symbol of its name.
                name = f"{below}.{part.name}"
                found |= {name: part.name.upper()} | _names(part, name)
        elif dataclasses.is_dataclass(content):
            found |= _choice(field.metadata, below) | _names(content, below)
    return found


def _choice(metadata: Mapping[str, Any], path: str) -> dict[str, str]:
    choice = metadata["part"].choice if "part" in metadata else _CHOICES.get(path, "")
    return {path: choice} if choice else {}
