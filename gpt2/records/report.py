"""The report of a plan and its figures: question, cost, settings, commands, other folders.

Does not import torch.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.records.sections import sections
from gpt2.study.plan import Plan
from gpt2.training.budget import run_budget
from lib.config.field import SymbolValue
from lib.config.layers import to_kconfig_text
from lib.config.private import PRIVATE_SYMBOLS
from lib.config.tree import KconfigTree, describe_symbol
from lib.errors import ConfigError, Problem
from lib.json_files import RecordError
from lib.report.figures import FIGURES_FOLDER, write_figures
from lib.report.plots import study_figures
from lib.report.run_results import run_origin
from lib.report.series import study_series
from lib.report.study import study_document
from lib.report.table import ResultTable
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir
from lib.tracking.verdict_run import VERDICTS_RUN

_TITLES = {"single": "One training", "matrix": "Test matrix", "sweep": "Sweep"}
# Folders beside the runs that other commands write.
SELECTION_FOLDER = f"{FIGURES_FOLDER}-selection"
_KNOWN_FOLDERS = {FIGURES_FOLDER, SELECTION_FOLDER, "trackio", VERDICTS_RUN}
_SHIPPED = ("defconfig", "fragment")


def draw_figures(plan: Plan, table: ResultTable, folder: str) -> list[Path]:
    """Write the figures of the plan's report into ``folder`` beside the runs. Return their paths.

    Raises ConfigError if no run has a result, PreflightError if matplotlib is not installed.
    """
    figures = study_figures(study_document_of(plan, table), study_series(table))
    if not figures:
        raise ConfigError(Problem("no run has a result", next="type: make", code="run.not-found"))
    return write_figures(figures, plan.folder / folder)


def study_document_of(plan: Plan, table: ResultTable) -> dict[str, Any]:
    """Return the document of the plan's study; see ``lib.report.study``."""
    first = next(iter(table.results), None)
    settings = recorded_settings(first) if first else []
    runs = {run.variant.slug: run for run in plan.runs}
    context = {
        "title": _TITLES.get(plan.study, f"Study {plan.study}"),
        "question": _question(plan),
        "flops": {slug: run.config.model.flops_per_token() for slug, run in runs.items()},
        "settings": [(n, str(s["value"]), f"{s['label']}, {s['where']}") for n, s in settings],
        "commands": _commands(plan, table.results, settings),
        "other_folders": other_folders(plan),
    }
    document = study_document(table, context)
    of_plan = [asdict(section) for section in sections(plan, table)]
    return {**document, "sections": [*of_plan, *document["sections"]]}


def other_folders(plan: Plan) -> list[tuple[str, str]]:
    """Return name and state of every folder beside the plan's runs that is none of them."""
    planned = {run.path.name for run in plan.runs if run.path.parent == plan.folder}
    if not plan.folder.is_dir():
        return []
    known = planned | _KNOWN_FOLDERS
    names = sorted(n for n in os.listdir(plan.folder) if n not in known and not n.startswith("."))
    folders = (path for name in names if (path := plan.folder / name).is_dir())
    return [(path.name, _state(RunRecord(RunDir(path)))) for path in folders]


def _state(record: RunRecord) -> str:
    if record.state == "replaced":
        return "moved aside, because the run was trained again"
    try:
        recorded = f"configuration {record.hash8}"
    except RecordError as error:
        if record.status is None:
            return "not a run"
        recorded = f"unreadable configuration: {error.problems[0].what}"
    state = f"{record.state} {record.status.message if record.status else ''}".strip()
    return f"{state}; not planned by .config with these steps and seeds; {recorded}"


def _question(plan: Plan) -> list[str]:
    """Describe the trained models and data in sentences."""
    variants = list({run.variant.slug: run.variant for run in plan.runs}.values())
    seeds = sorted({run.seed for run in plan.runs})
    count, unit = len(variants), "model" if len(variants) == 1 else "models"
    sentences = [
        f"Trained: {count} {unit} with {len(seeds)} seed{'s' * (len(seeds) > 1)} "
        f"({', '.join(map(str, seeds))}), profile {plan.base.repro.profile}."
    ]
    if plan.runs:
        sentences.append(_model(plan.runs[0]))
    if plan.sweep is not None:
        sentences.append(f"Axes: {plan.sweep.axes}.")
    return sentences


def _model(run: Run[Config]) -> str:
    config, shape, budget = run.config, run.config.model.shape, run_budget(run.config)
    length = (
        f"{budget.seconds} seconds"
        if budget.is_time
        else f"{budget.iterations:,} iterations of {budget.tokens_per_iteration:,} tokens"
    )
    documents, tokens = config.data.eval_documents, config.data.eval_tokens
    evaluated = f"{documents:,} whole documents" if documents else f"{tokens:,} tokens"
    return (
        f"{run.variant.slug}: {config.model.num_params():,} parameters in {shape.n_layer} blocks of "
        f"width {shape.n_embd} with {shape.n_head} heads, a context of {shape.block_size} tokens; "
        f"{length}; data set {config.data.dataset}, tokenizer {config.data.tokenizer}, evaluation "
        f"on {evaluated}."
    )


def recorded_settings(record: RunRecord) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the settings of a run that are not defaults, except those of its step and seed.

    Raises RecordError if the configuration cannot be read.
    """
    recorded = record.config.find("settings")
    if not isinstance(recorded, Mapping):
        return []
    # A run of an earlier version may have recorded private values.
    return [
        (name, setting)
        for name, setting in sorted(recorded.items())
        if isinstance(setting, Mapping) and setting.keys() >= {"value", "label", "where"}
        if setting["label"] != "plan" and name not in PRIVATE_SYMBOLS
    ]


def _commands(
    plan: Plan, results: Sequence[RunRecord], settings: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, str]]:
    """Return the commands that repeat the study, and a single run bit by bit."""
    commits = dict.fromkeys(run_origin(record)["commit"] for record in results)
    commands = [(f"git checkout {commit}", "the code") for commit in commits if commit]
    files = [str(s["where"]).partition(":")[0] for _, s in settings if s["label"] in _SHIPPED]
    names = "+".join(dict.fromkeys(file.rpartition("/")[2] for file in files))
    if names:
        others = {name: s["value"] for name, s in settings if s["label"] not in _SHIPPED}
        assigned = f" SET={shlex.quote(set_text(others))}" if others else ""
        commands.append((f"make defconfig-{names}{assigned}", "the configuration"))
    seeds = ",".join(map(str, sorted({run.seed for run in plan.runs})))
    commands.append((f"make SEEDS={seeds}", "all runs, and this report"))
    if results:
        folder = results[0].run.path.name
        commands.append((f"make reproduce RUN={folder}", "one run, compared byte by byte"))
    commands.append(("make report", "this report again, from the same folders"))
    return commands


def set_text(settings: Mapping[str, SymbolValue]) -> str:
    """Return the text of SET= that assigns ``settings``."""
    words = members_set(settings).items()
    return " ".join(f"{name}={shlex.quote(to_kconfig_text(value))}" for name, value in words)


def members_set(settings: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return the settings with the member of each choice in place of the choice."""
    tree, assigned = KconfigTree(), dict[str, SymbolValue]()
    for name, value in settings.items():
        item = tree.find(name)
        members = describe_symbol(item).members if item is not None else ()
        chosen = [m for m in members if value in (m.lower(), m.removeprefix(f"{name}_").lower())]
        assigned |= dict.fromkeys(chosen, True) if chosen else {name: value}
    return assigned
