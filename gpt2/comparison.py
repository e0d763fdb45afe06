"""Comparison of run directories in terms of their configuration symbols. Does not import torch."""

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

# {path of a component: the Kconfig choice that selects it}
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
    """Compare the finished runs ``a`` and ``b``, each a directory or a run name in .config's plan.

    ``axis`` and ``label_by`` are comma-separated symbols or fields. Raises ConfigError if a symbol
    or field is unknown, or a run is missing or unfinished.
    """
    for value, name in ((a, "A"), (b, "B")):
        if not value:
            advice = "type: make compare A=DIR B=DIR"
            raise ConfigError(Problem("no run given", name, advice, code="usage.missing-argument"))
    left, right = (find_finished(name, build_dir, **selection) for name in (a, b))
    facts = read_facts(left), read_facts(right)
    return judge(*facts, names_of([left, right]), words(axis), words(label_by))


def finalists(named: str, build_dir: Path, **selection: str) -> Report:
    """Compare the finalists in ``named``: directories, or patterns over directories or run names.

    Raises ConfigError if an item matches no run.
    """
    paths: dict[Path, None] = {}
    for word in words(named):
        paths |= dict.fromkeys(_matching(word, build_dir, **selection))
    runs = [RunDir(path) for path in paths]
    return judge_finalists(runs, names_of(runs))


def _matching(word: str, build_dir: Path, **selection: str) -> list[Path]:
    folders = [Path(name) for name in sorted(glob(word)) if ".old-" not in name]
    if folders := [path for path in folders if RunDir(path).resolved_config.exists()]:
        return folders
    plan = make_plan(config_layers(build_dir), build_dir, **selection)
    return [run.path for run in plan.matching(word)]


def words(text: str) -> list[str]:
    """Split a list separated by commas or spaces."""
    return text.replace(",", " ").split()


def names_of(runs: Sequence[RunDir]) -> dict[str, str]:
    """Return {setting path: symbol}; empty if this code cannot read one of the runs."""
    names: dict[str, str] = {}
    try:
        for run in runs:
            names |= symbol_names(read_resolved_config(run))
    except ConfigError:
        return {}
    return names


def symbol_names(config: Config) -> dict[str, str]:
    """Return {path: symbol} for each setting of the identity."""
    return _names(config, "")


def _names(value: Any, path: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for field in dataclasses.fields(value):
        if not field.metadata.get("identity", True):
            continue
        below = f"{path}.{field.name}" if path else field.name
        content = vars(value)[field.name]
        if "symbol" in field.metadata:
            names[below] = field.metadata["symbol"]
        elif isinstance(content, tuple):
            for component in content:
                # An optional component is selected by the symbol of its name.
                name = f"{below}.{component.name}"
                names |= {name: component.name.upper()} | _names(component, name)
        elif dataclasses.is_dataclass(content):
            names |= _choice(field.metadata, below) | _names(content, below)
    return names


def _choice(metadata: Mapping[str, Any], path: str) -> dict[str, str]:
    choice = metadata["part"].choice if "part" in metadata else _CHOICES.get(path, "")
    return {path: choice} if choice else {}
