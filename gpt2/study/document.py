"""The document of a plan's study and its figures: question, cost, settings, commands, sections.

Declared figures come from configurations, all other figures from the directories of finished runs.
Does not import torch.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kconfiglib import Choice

from gpt2.config import Config
from gpt2.study.plan import Plan
from gpt2.training.budget import TrainingBudget
from lib.config.field import SymbolValue
from lib.config.layers import to_kconfig_text
from lib.config.private import PRIVATE_SYMBOLS
from lib.config.tree import KconfigTree, member_values
from lib.report.columns import loss_cell
from lib.report.render import TableSection
from lib.report.run_results import planned_run, read_curves, run_origin
from lib.report.study import JudgedStudy, finished_of, study_document
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.units import count, format_difference

_TITLES = {"single": "One training", "matrix": "Test matrix", "sweep": "Sweep"}
_SHIPPED = ("defconfig", "fragment")


def study_document_of(plan: Plan, study: JudgedStudy) -> dict[str, Any]:
    """Return the document: the part of the runs, and the part of the plan.

    ``settings`` are symbol, value and source of those that are not defaults, ``commands`` command and
    purpose, ``left_out`` the combinations that are ruled out.
    """
    document = study_document(study)
    least = document["rule"]["min_seeds"]
    flops = {run.variant.slug: run.config.model.flops_per_token() for run in plan.runs}
    for row in document["rows"]:
        row["flops_per_token"] = flops.get(row["slug"])
    results = finished_of(study.listed)
    settings = recorded_settings(results[0]) if results else []
    return document | {
        "title": _TITLES.get(plan.study, f"Study {plan.study}"),
        "question": _question(plan),
        "settings": setting_rows(settings),
        "commands": _commands(plan, results, settings),
        "more_seeds": _training(plan, least, f"1-{least}"),
        "left_out": [str(problem) for problem in plan.left_out],
        "notes": [*filter(None, [plan.note]), *document["notes"]],
        "sections": [asdict(each) for each in sections(plan, study, document["rows"])],
    }


def _question(plan: Plan) -> list[str]:
    """Return what the plan trains, the first model, and the axes of a sweep, as sentences."""
    seeds = sorted({run.seed for run in plan.runs})
    models = count(len({run.variant.slug for run in plan.runs}), "model")
    planned = (
        f"Planned: {models} with {count(len(seeds), 'seed')} ({', '.join(map(str, seeds))}), "
        f"profile {plan.base.repro.profile}."
    )
    axes = [f"Axes: {plan.sweep}."] if plan.sweep else []
    return [planned, *map(_model, plan.runs[:1]), *axes]


def _model(run: Run[Config]) -> str:
    config, shape, budget = run.config, run.config.model.shape, TrainingBudget(run.config)
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


def setting_rows(settings: Sequence[tuple[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return symbol, value and source of each setting."""
    return [[n, str(s["value"]), f"{s['label']}, {s['where']}"] for n, s in settings]


def _training(plan: Plan, number: int, seeds: str) -> str:
    """Return the command that trains ``number`` seeds of each model."""
    return f"{plan.command} COUNT={number}" if plan.command else f"make SEEDS={seeds}"


def _commands(
    plan: Plan, results: Sequence[RunRecord], settings: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[list[str]]:
    commits = dict.fromkeys(run_origin(record)["commit"] for record in results)
    commands = [[f"git checkout {commit}", "the code"] for commit in commits if commit]
    files = [str(s["where"]).partition(":")[0] for _, s in settings if s["label"] in _SHIPPED]
    names = "+".join(dict.fromkeys(file.rpartition("/")[2] for file in files))
    if names:
        others = {name: s["value"] for name, s in settings if s["label"] not in _SHIPPED}
        assigned = f" SET={shlex.quote(set_text(others))}" if others else ""
        commands.append([f"make defconfig-{names}{assigned}", "the configuration"])
    seeds = sorted({run.seed for run in plan.runs})
    what = "all runs, and this report"
    if plan.command:
        what = "the unchanged runs, and this report; a change is its SET="
    commands.append([_training(plan, len(seeds), ",".join(map(str, seeds))), what])
    if results:
        folder = results[0].run.path.name
        commands.append([f"make reproduce RUN={folder}", "one run, compared byte by byte"])
    if not plan.command:
        commands.append(["make report", "this report again, from the same folders"])
    return commands


def set_text(settings: Mapping[str, SymbolValue]) -> str:
    words = members_set(settings).items()
    return " ".join(f"{name}={shlex.quote(to_kconfig_text(value))}" for name, value in words)


def members_set(settings: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return the settings with the member of each choice in place of the choice."""
    tree, assigned = KconfigTree(), dict[str, SymbolValue]()
    for name, value in settings.items():
        item = tree.find(name)
        members = member_values(item) if isinstance(item, Choice) else {}
        chosen = [m.name for word, m in members.items() if value in (m.name.lower(), word)]
        assigned |= dict.fromkeys(chosen, True) if chosen else {name: value}
    return assigned


# Sections below the rows: ranking of a sweep, keys read and NSA gates, speed.


# Statistic logged by native sparse attention → column heading.
_GATE_HEADINGS = {
    "nsa/gate_moved": "gates moved",
    "nsa/gate_entropy": "gate entropy",
    "nsa/share_cmp": "compressed",
    "nsa/share_sel": "selected",
    "nsa/share_win": "window",
    "nsa/chosen": "free blocks",
    "nsa/distance": "distance",
}


def sections(
    plan: Plan, study: JudgedStudy, rows: Sequence[Mapping[str, Any]]
) -> list[TableSection]:
    combined = bool(plan.sweep) or plan.base.study.mode == "test_matrix_mode"
    candidates = [
        ranking(rows) if plan.sweep else None,
        _attention(study.finished),
        _speed(study.finished) if combined and study.finished else None,
    ]
    return [section for section in candidates if section]


_RANKING_NOTE = (
    "The lowest point is selected by its loss, so a difference from it is no verdict: train both with "
    "seeds\nthat the sweep did not have.\n"
)


def ranking(rows: Sequence[Mapping[str, Any]]) -> TableSection | None:
    """Return the points of a sweep by their loss; None if fewer than two can be compared.

    A point with a diverged seed has no loss. Rows with labels are not comparable.
    """
    points = sorted((r for r in rows if r["val_loss"] is not None), key=lambda r: r["val_loss"])
    if len(points) < 2 or any(row["labels"] for row in points):
        return None
    lowest = points[0]["val_loss"]
    factors = list(dict.fromkeys(name for row in points for name in row["levels"]))
    lines = []
    for rank, row in enumerate(points, 1):
        loss = row["val_loss"]
        difference = format_difference(loss - lowest) if rank > 1 else "lowest"
        values = [row["levels"].get(name, "-") for name in factors]
        cell = loss_cell(loss, row["val_loss_sd"], row["n"])
        lines.append([str(rank), *values, cell, difference, row["state"]])
    header = ["rank", *factors, "val loss", "Δ lowest", "state"]
    return TableSection("Ranking", header, lines, _RANKING_NOTE, is_short=True)


def _attention(records: Sequence[RunRecord]) -> TableSection | None:
    """Return pairs, reads and final NSA gate statistics; None if all runs have equal pairs."""
    if len({planned_run(r).config.model.pairs_per_token() for r in records}) < 2:
        return None
    statistics = [read_curves(record).last_statistics for record in records]
    names = [name for name in _GATE_HEADINGS if any(name in values for values in statistics)]
    rows = []
    for record, values in zip(records, statistics, strict=True):
        model = planned_run(record).config.model
        cells = [f"{values[name]:.3f}" if name in values else "-" for name in names]
        rows.append((_name(record), f"{model.pairs_per_token():.1f}", str(model.reads()), *cells))
    note = "Pairs: mean query-key pairs per token and head; reads: keys read by the last token.\n"
    if names:
        note += (
            "Gates: last logged statistics, means over heads, tokens and layers: distance from "
            "initialization,\nentropy and share of each branch; blocks selected freely, and their "
            "distance in tokens.\n"
        )
    header = ("run", "pairs", "reads", *(_GATE_HEADINGS[name] for name in names))
    return TableSection("Keys read", header, rows, note)


def _speed(records: Sequence[RunRecord]) -> TableSection:
    rows = []
    for record in records:
        timing, code, hardware = record.timing, record.code, record.hardware
        commit = (code.git_sha or "unknown")[:12] + " edited" * (code.dirty_tree is True)
        beats = (beat.mem_reserved_mib for each in record.heartbeats.values() for beat in each)
        rows.append(
            (
                _name(record),
                f"{1000 * timing.mean_step_seconds:.1f}",
                f"{timing.tokens_per_second:,.0f}",
                f"{max(beats, default=0.0):,.0f}",
                record.manifest.value(str, "attention", "kernel"),
                hardware.gpu_name or hardware.cpu_model,
                commit,
            )
        )
    header = ("run", "step ms", "tok/s", "reserved MiB", "backend", "device", "commit")
    note = "MiB: peak memory of one process over the log lines; on a CPU, resident memory.\n"
    return TableSection("Speed", header, rows, note, is_short=True)


def _name(record: RunRecord) -> str:
    run = planned_run(record)
    return f"{run.variant.slug} s{run.seed}"
