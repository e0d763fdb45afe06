"""``make report RUN=``: runs that are named by their directories, also those of code that is gone.

The configuration of a run is the one that it recorded. Its study is what its folder declared: the words
are those of the looks that were taken there, on all runs of the study that are beside it.
"""

import contextlib
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.records.files import find_started
from gpt2.records.listing import RUN_NAME, is_run, results_folder
from gpt2.running.results import results_text
from gpt2.study.arguments import asked_lookup
from gpt2.study.document import recorded_settings, setting_rows
from gpt2.study.study_file import AA, AGAIN
from lib.console import log
from lib.files import json_digest
from lib.json_files import RecordError
from lib.report.columns import SCHEMA_VERSION, write_tables
from lib.report.declarations import VerdictPlan, concerning, plans_of, read_declarations
from lib.report.options import NATS
from lib.report.page import write_report
from lib.report.plots import study_series
from lib.report.render import json_document
from lib.report.statistics import VerdictRule
from lib.report.study import JudgedStudy, finished_of, read_study, study_document
from lib.report.text import Document
from lib.runs.code import TreeDigests, run_drift
from lib.runs.identity import configuration_digest
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir


@dataclass(frozen=True)
class RecordedConfig:
    """The configuration of a run, as any code recorded it."""

    hash8: str
    recorded: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return json_digest(self.recorded)

    def identity(self) -> dict[str, Any]:
        return dict(self.recorded)


def report_named(options: Namespace) -> str:
    """Return the tables of the runs of RUN=, each with its study, and write table and report of each
    below the results folder; nothing is written beside the runs.
    """
    found = find_started(options.run, options.build_dir, asked_lookup(options), variable="RUN")
    named = left = list(dict.fromkeys(run.path.resolve() for run in found))
    labels, documents, texts = options.label_by.replace(",", " ").split(), [], []
    while left:
        study = _study_of(left[0], labels)
        shown = study.of_runs(named)
        name = f"{study.name}-{RunRecord(RunDir(left[0])).hash8}"
        folder = results_folder(options.build_dir).absolute() / "named" / name
        folder.mkdir(parents=True, exist_ok=True)
        documents.append(_document(shown, folder))
        for path in write_tables(documents[-1], folder):
            log("TABLE", str(path))
        write_report(documents[-1], study_series(shown), folder)
        texts.append(results_text(documents[-1], shown, folder))
        paths = {each.run.path for each in study.records}
        left = [path for path in left if path not in paths]
    if options.json:
        return json_document(SCHEMA_VERSION, {"studies": documents})
    return "\n".join(texts)


def _study_of(path: Path, labels: Sequence[str]) -> JudgedStudy:
    """Return the study of a run at the looks that were taken; alone, if its folder declares none."""
    beside, lines = {path: _run(path)}, read_declarations(path.parent)
    for each in sorted(path.parent.iterdir()):
        with contextlib.suppress(RecordError):
            if is_run(each) and not RunDir(each).is_replaced:
                beside.setdefault(each, _run(each))
    own = {beside[path].variant.slug: _digest(beside[path])}
    plans = plans_of(concerning(lines, own))
    family, rule = (plans[-1].family, plans[-1].rule) if plans else ({}, {})
    arms = {arm: digest for each in family.values() for arm, digest in each.items()} or own
    pairs = [name.split(" vs ") for name in family if " vs " in name]
    baseline = next((other for _, other in pairs if other not in dict(pairs)), "")
    # Of a step that is compared with both, the parent is not the baseline.
    parents = dict(sorted(pairs, key=lambda pair: pair[1] != baseline))
    variants = {
        slug: RunVariant(slug, parent=parents.get(slug, ""))
        for slug in sorted(arms, key=lambda slug: (slug in parents, slug))
    }
    aa, again = (f"{baseline}-{end}" for end in (AA, AGAIN))
    variants[aa] = RunVariant(aa, parent=baseline, is_aa=True)
    variants[again] = RunVariant(again, parent=baseline, is_repeat=True)
    runs = [r for r in beside.values() if arms.get(r.variant.slug) in ("", _digest(r))]
    # No family has the controls, whose configuration is that of the baseline but for its weights.
    same = {_digest(run, "init") for run in runs}
    controls = (r for r in beside.values() if r.variant.slug in (aa, again))
    runs += [run for run in controls if _digest(run, "init") in same]
    runs = [replace(run, variant=variants[run.variant.slug]) for run in runs]
    runs.sort(key=lambda run: [*variants].index(run.variant.slug))
    known = {each.name: rule[each.name] for each in fields(VerdictRule) if each.name in rule}
    others = {"against": rule.get("against", "both"), "unit": rule.get("unit", NATS)}
    declared = VerdictPlan(
        VerdictRule(**known), declarations=lines, folder=path.parent, exploratory=True, **others
    )
    is_stale = partial(run_drift, device=None, tree=TreeDigests())
    return read_study(path.parent.name, runs, declared, labels, is_stale)


def _run(path: Path) -> Run[RecordedConfig]:
    record, name = RunRecord(RunDir(path)), RUN_NAME.fullmatch(path.name)
    config = RecordedConfig(record.hash8, record.identity)
    variant = RunVariant(name["step"] if name else path.name)
    return Run(path.parent.name, variant, int(record.identity.get("seed", 0)), config, path)


def _digest(run: Run[RecordedConfig], *without: str) -> str:
    identity = run.config.identity()
    return configuration_digest({k: v for k, v in identity.items() if k not in without})


def _document(study: JudgedStudy, folder: Path) -> Document:
    """Return the document of a study whose files are in ``folder``, from which paths lead to the runs."""
    document, results = study_document(study), finished_of(study.listed)
    paths = {o.run.path.name: os.path.relpath(o.run.path, folder) for o in study.listed}
    for row in document["rows"]:
        row |= {"flops_per_token": None, "runs": [paths[name] for name in row["runs"]]}
    for run in document["runs"]:
        run["folder"] = paths[run["folder"]]
    words = shlex.join(["make", "report", f"RUN={' '.join(str(o.run.path) for o in study.listed)}"])
    return document | {
        "title": f"Runs of {study.name}",
        "question": ["Named runs, each with the configuration that it recorded."],
        "settings": setting_rows(recorded_settings(results[0])) if results else [],
        "commands": [[words, "this report again"]],
        # No one command trains runs of several configurations.
        "more_seeds": "",
        "left_out": [],
        "sections": [],
    }
