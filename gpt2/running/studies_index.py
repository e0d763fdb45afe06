"""The index page of a results folder: each study with its question, its answer and its runs.

The studies beside the reported one are planned again from the settings that their latest run recorded,
and judged on their runs; one that cannot be planned by this code is a row with the reason.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpt2.study.document import members_set, recorded_settings
from gpt2.study.plan import Plan, make_plan, table_plan
from lib.config.layers import ConfigLayer
from lib.errors import KablateError
from lib.files import write_atomic
from lib.report.page import REPORT_FILE, render_page
from lib.report.text import Document, answer, best_verdict, verdict_colour, verdict_word
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, read_status

INDEX_FILE = "index.html"
_STUDY_FILE = "ABLATION_STUDY_FILE"

# Choices of the study, which a run does not record among its settings.
_CHOICES = ("RUN_MODE", "ABLATION_STUDY")


def write_index(plan: Plan, document: Document, judge: Callable[[Plan], Document]) -> Path:
    """Write the index of the folder that contains the plan's study. Return its path.

    ``document`` is that of the plan; ``judge`` returns the document of another, and writes nothing.
    """
    path = plan.folder.parent / INDEX_FILE
    rows = []
    for folder, runs in _study_folders(plan.folder.parent).items():
        if folder.name == plan.folder.name:
            rows.append(_row(folder, runs, document, ""))
        else:
            rows.append(_row(folder, runs, *_judged(runs[0][1], folder, plan, judge)))
    rows.sort(key=lambda row: (-row["ended_at"], row["study"]))
    write_atomic(path, render_page("index.html.jinja", title="Studies", rows=rows))
    return path


def _study_folders(results: Path) -> dict[Path, list[tuple[RunStatus, RunDir]]]:
    """Return the runs of each folder with their statuses, the latest first; follow no links."""
    folders: dict[Path, list[tuple[RunStatus, RunDir]]] = {}
    for path in sorted(results.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        runs = []
        for each in path.iterdir():
            run = RunDir(each)
            if not each.is_symlink() and not run.is_replaced and (status := read_status(run)):
                runs.append((status, run))
        if runs:
            folders[path] = sorted(runs, key=lambda pair: (-pair[0].written_at, pair[1].path.name))
    return folders


def _row(
    folder: Path,
    started: Sequence[tuple[RunStatus, RunDir]],
    document: Document | None,
    reason: str,
) -> dict[str, Any]:
    best = best_verdict(document) if document else None
    # Equal runs of another folder are runs of the study, too.
    runs = [run["state"] == "done" for run in document["runs"]] if document else []
    finished = sum(status.state is State.SUCCESS for status, _ in started)
    ended = max(status.written_at for status, _ in started)
    report = folder / REPORT_FILE
    return {
        "study": folder.name,
        "report": (f"{quote(os.fsencode(folder.name))}/{REPORT_FILE}" if report.is_file() else ""),
        "question": " ".join(document["question"]) if document else "",
        "answer": answer(document) if document else reason,
        "word": verdict_word(best) if best else "",
        "colour": verdict_colour(best) if best else "",
        "step": best["step"] if best else "",
        "done": sum(runs) if document else finished,
        "planned": len(runs) if document else None,
        "ended_at": ended,
        "date": _date(ended),
    }


def _judged(
    latest: RunDir, folder: Path, plan: Plan, judge: Callable[[Plan], Document]
) -> tuple[Document | None, str]:
    """Return the document of a study from its runs; None and the reason if it cannot be planned."""
    record = RunRecord(latest)
    try:
        symbols = record.symbols
        recorded = {name: setting["value"] for name, setting in recorded_settings(record)}
        recorded |= {name: symbols[name] for name in _CHOICES if symbols.get(name)}
        if recorded.get(_STUDY_FILE, "") not in ("", plan.base.values[_STUDY_FILE]):
            return None, f"{_STUDY_FILE}={recorded[_STUDY_FILE]}: see the report of the study."
        recorded["OUTPUT_DIR"] = plan.base.study.output_dir
        # The seeds are those of the runs that were started.
        recorded.pop("SEED_LIST", None)
        layers = [ConfigLayer.of("config of a run", record.run.path.name, members_set(recorded))]
        one = make_plan(layers, plan.build_dir, optional=True, yes=None)
        if one.folder != folder:
            return None, "Its settings are not those of a study: see its report."
        return judge(table_plan(one)), ""
    except KablateError as error:
        what = error.problems[0].what
        return None, f"Not judged by this code, from {record.run.path.name}: {what}."


def _date(seconds: float) -> str:
    """Return the date in UTC; "" if the number is not a time."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return ""
