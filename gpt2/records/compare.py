"""Comparison of run directories by their symbols: which of them the study declares to differ.

Does not import torch.
"""

import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Sequence, Set
from glob import glob
from pathlib import Path
from typing import Any

from gpt2.attention.config import PATTERNS, POSITIONS, PROJECTIONS
from gpt2.config import Config
from gpt2.records.files import find_finished, read_resolved_config
from gpt2.study.arguments import RunLookup, asked_lookup
from gpt2.study.plan import Plan, config_layers, make_plan, with_runs
from lib.console import log
from lib.errors import ConfigError, Problem
from lib.optim.options import OPTIMIZERS
from lib.pruning.options import PRUNERS
from lib.report.compare import (
    NOT_COMPARABLE,
    Comparison,
    check_fields,
    compare_runs,
    comparison_shown,
)
from lib.runs.record import RunRecord
from lib.runs.run import RunVariant
from lib.runs.run_dir import RunDir

# {path of a component: the Kconfig choice that selects it}
_CHOICES = {
    "model.attention.pattern": PATTERNS.choice,
    "model.attention.positions": POSITIONS.choice,
    "model.attention.projection": PROJECTIONS.choice,
    "optimizer": OPTIMIZERS.choice,
    "pruning": PRUNERS.choice,
}


def compare(
    a: str,
    b: str,
    build_dir: Path,
    axis: str = "",
    label_by: str = "",
    lookup: RunLookup | None = None,
) -> Comparison:
    """Compare two finished runs, each a directory or a planned run. Raises ConfigError."""
    lookup = lookup or RunLookup()
    for value, name in ((a, "A"), (b, "B")):
        if not value:
            advice = "type: make compare A=DIR B=DIR"
            raise ConfigError(Problem("no run given", name, advice, code="usage.missing-argument"))
    left, right = records = [
        RunRecord(find_finished(run, build_dir, lookup, variable=name))
        for name, run in (("A", a), ("B", b))
    ]
    paths = {record.run.path.resolve() for record in records}
    seeds = ",".join(sorted({str(record.symbols.get("SEED", "")) for record in records}))
    study = None
    # Runs can be compared without a configuration, and with one that has other steps.
    with contextlib.suppress(ConfigError):
        layers = [*config_layers(build_dir), *lookup.settings]
        study = whole_study(make_plan(layers, build_dir, seeds=seeds, yes=True, optional=True))
    planned = {run.path.resolve(): run for run in study.runs} if study else {}
    names, declared = names_of(records), set[str]()
    is_planned = paths <= planned.keys()
    if study and is_planned:
        # A planned run has a configuration even if this code cannot read the recorded one.
        for path in paths:
            names |= symbol_names(planned[path].config)
        declared = left.symbols.keys() & set().union(*declared_axes(study, records, "").values())
    result = compare_runs(left, right, names, [*words(axis), *sorted(declared)], words(label_by))
    folder, *others = {path.parent for path in paths}
    if result["verdict"] == NOT_COMPARABLE and not is_planned and not others:
        what = f"{folder.name} is not the study of .config, whose steps declare what may differ: "
        what += "load its configuration (make defconfig-NAME), or name the differences "
        log("NOTE", f"{what}(AXIS=SYMBOL,..)")
    return result


def words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def names_of(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return {setting path: symbol}; settings of runs made by other code keep their paths."""
    names: dict[str, str] = {}
    for record in records:
        try:
            names |= symbol_names(read_resolved_config(record.run))
        except ConfigError as error:
            log("WARN", f"{record.run.path.name}: {error.problems[0].what}")
    return names


def symbol_names(config: Config) -> dict[str, str]:
    """Return {path: symbol} for each setting of the identity."""
    names = _names(config, "")
    # See Config.identity.
    names["model.shape.activation"] = names.pop("model.mlp.activation")
    return names


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
            part = field.metadata.get("part")
            if choice := part.choice if part else _CHOICES.get(below, ""):
                names[below] = choice
            names |= _names(content, below)
    return names


def whole_study(plan: Plan) -> Plan:
    """Return ``plan`` with every step of its study, also the ancestors of its steps."""
    steps, seeds = "all" if plan.ablation else "", ",".join(map(str, plan.seeds))
    return with_runs(plan, steps, seeds)


def chosen_runs(plan: Plan, study: Plan, named: str) -> list[RunRecord]:
    """Return the finished runs of ``plan``, or those ``named``, which must be finished."""
    paths: dict[Path, None] = {}
    for word in words(named):
        folders = [path for path in map(Path, sorted(glob(word))) if not RunDir(path).is_replaced]
        folders = [path for path in folders if RunDir(path).resolved_config.exists()]
        paths |= dict.fromkeys(folders or [run.path for run in study.matching(word)])
    planned = [run.path for run in plan.runs if not run.variant.is_repeat]
    records = [RunRecord(RunDir(path)) for path in paths or planned]
    unfinished = [record for record in records if not record.is_done]
    refused = [record for record in unfinished if named or record.damage]
    if problems := [record.unfinished for record in refused if record.unfinished]:
        raise ConfigError(*problems)
    for record in unfinished:
        if record.status:
            log("SKIP", f"{record.run.path.name} is {record.state}")
    if new := sum(record.status is None for record in unfinished):
        log("SKIP", f"{new} runs of the study are new")
    if len(unfinished) == len(records):
        what = "no run is finished"
        raise ConfigError(Problem(what, plan.study, "type: make", code="run.not-finished"))
    return [record for record in records if record.is_done]


def declared_axes(study: Plan, records: Sequence[RunRecord], named: str) -> dict[Path, Set[str]]:
    """Return {run directory: symbols that its step, an ancestor of it, or ``named`` sets}."""
    if named:
        check_fields(records, names_of(records), words(named), "AXIS")
    variants = {run.variant.slug: run.variant for run in study.runs}
    planned = {run.path.resolve(): run for run in study.runs}
    axes: dict[Path, Set[str]] = {}
    for path in (record.run.path for record in records):
        symbols = set(words(named))
        if (known := planned.get(path.resolve())) is not None:
            # Replace a member of a choice by the choice: OPTIMIZER_SGD by OPTIMIZER.
            values = known.config.values.items()
            choices = {f"{name}_{value}".upper(): name for name, value in values}
            variant: RunVariant | None = known.variant
            while variant is not None:
                symbols |= {choices.get(name, name) for name in variant.delta or ()}
                variant = variants.get(variant.parent)
        axes[path] = symbols
    return axes


def compare_asked(options: Namespace) -> tuple[int, str]:
    """Compare two finished runs from their directories.

    kablate compare A B                          one configuration: are the results bitwise equal?
    kablate compare ra baseline                  steps of .config's study: the loss difference
    kablate compare A B --axis RECIPROCAL        runs that differ in this symbol
    kablate compare A B --label-by PRECISION     runs that also differ in this, shown as a label

    A run is a directory or a run name that "make plan" lists. Prints BITWISE, DIVERGED with the first
    differing field, COMPARED with the paired difference A - B of the losses, or NOT COMPARABLE with
    every differing field that is not in --axis or --label-by, and not set by the steps of .config's
    study. Exit codes: 0 equal or compared, 1 diverged, 2 no such run or field, 4 not comparable.
    """
    o = options
    result = compare(o.a, o.b, o.build_dir, o.axis, o.label_by, asked_lookup(o))
    return comparison_shown(result, o.json)
