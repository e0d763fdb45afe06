"""Additional sections of the result table: ranking of a sweep, keys read and NSA gates, speed.

Declared figures come from configurations, all other figures from the directories of finished runs.
Does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpt2.study.plan import Plan
from lib.report.columns import loss_cell
from lib.report.render import TableSection
from lib.report.run_curves import read_curves
from lib.report.run_results import planned_run
from lib.report.table import ResultTable
from lib.runs.record import RunRecord
from lib.units import format_difference

# {statistic logged by native sparse attention: column heading}
_GATE_HEADINGS = {
    "nsa/gate_moved": "gates moved",
    "nsa/gate_entropy": "gate entropy",
    "nsa/share_cmp": "compressed",
    "nsa/share_sel": "selected",
    "nsa/share_win": "window",
    "nsa/chosen": "free blocks",
    "nsa/distance": "distance",
}


def sections(plan: Plan, table: ResultTable) -> list[TableSection]:
    """Return the non-empty sections for the plan's finished runs."""
    combined = plan.sweep is not None or plan.base.study.mode == "test_matrix_mode"
    candidates = [
        ranking(table.rows) if plan.sweep is not None else None,
        _attention(table.finished),
        _speed(table.finished) if combined else None,
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


def _speed(records: Sequence[RunRecord]) -> TableSection | None:
    """Return step time, speed, backend, peak memory, code and device of each run."""
    if not records:
        return None
    rows = []
    for record in records:
        timing, code, hardware = record.timing, record.code, record.hardware
        commit = (code.git_sha or "unknown")[:12] + " edited" * (code.dirty_tree is True)
        rows.append(
            (
                _name(record),
                f"{1000 * timing.mean_step_seconds:.1f}",
                f"{timing.tokens_per_second:,.0f}",
                f"{_peak_reserved_mib(record):,.0f}",
                record.manifest.value(str, "attention", "kernel"),
                hardware.gpu_name or hardware.cpu_model,
                commit,
            )
        )
    header = ("run", "step ms", "tok/s", "reserved MiB", "backend", "device", "commit")
    note = "MiB: peak memory of one process over the log lines; on a CPU, resident memory.\n"
    return TableSection("Speed", header, rows, note, is_short=True)


def _peak_reserved_mib(record: RunRecord) -> float:
    beats = (beat for beats in record.heartbeats.values() for beat in beats)
    return max((beat.mem_reserved_mib for beat in beats), default=0.0)


def _name(record: RunRecord) -> str:
    run = planned_run(record)
    return f"{run.variant.slug} s{run.seed}"
