"""The commands that read finished runs: lists, reports, verdicts, claims, audits and comparisons."""

import sys
from argparse import Namespace
from pathlib import Path

from gpt2.records import compare, listing
from gpt2.records.audit import audit, to_json, to_text
from gpt2.records.files import find_started
from gpt2.records.verify import tracker, verify
from gpt2.running import results
from gpt2.study.arguments import asked_lookup, asked_plan, asked_tables, selects_runs
from gpt2.study.document import SELECTION_FOLDER, draw_figures, study_document_of
from gpt2.study.plan import table_plan
from gpt2.study.resolve import configured_values
from lib import console
from lib.config.dotconfig import ConfigWorkspace
from lib.console import log
from lib.errors import EXIT_DONE, EXIT_INVALID
from lib.files import pretty_json, write_atomic
from lib.make_variables import require_value
from lib.project import ROOT
from lib.report import claims
from lib.report.checklist import (
    checklist_to_json,
    checklist_to_markdown,
    log_failing,
    word_rows,
)
from lib.report.compare import CONTINUATION, EXIT_CODES, comparison_to_json, comparison_to_text
from lib.report.figures import FIGURES_FOLDER
from lib.report.render import json_document

_CLAIM_FILES = {"claims.tex": claims.claims_to_latex, "claims.md": claims.claims_to_markdown}


def ls(options: Namespace) -> str:
    """List the runs below OUTPUT_DIR, of all studies and configurations.

    kablate ls                                             one line per run
    kablate ls --where "N_LAYER=6 val_loss<2.5 state=done" only these

    Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
    train_seconds, finished, commit, hash) or a symbol with = != < <= > >=. A run that
    cannot be read is a line with the cause. Exit code 2: invalid condition.
    """
    listed = listing.select(listing.list_runs(_results(options.build_dir)), options.where)
    if options.json:
        return listing.to_json(listed)
    return listing.to_text(listed, options.where, every_column=console.is_verbose())


def clean_runs(options: Namespace) -> tuple[int, str]:
    """Remove the runs that satisfy the conditions, after a confirmation.

    kablate clean-runs --where "state=failed"

    Conditions are those of ls. Exit codes: 0 done, 1 a run was left out, 2 invalid condition, or not
    confirmed.
    """
    where = require_value(options.where, "WHERE", 'make clean-runs WHERE="state=failed"')
    return listing.clean(_results(options.build_dir), where, yes=options.yes, json=options.json)


def _results(build_dir: Path) -> Path:
    """Return the folder of all studies. Runs can be listed without a configuration."""
    return build_dir / str(configured_values(ConfigWorkspace(ROOT, build_dir))["OUTPUT_DIR"])


def report(options: Namespace) -> str:
    """Write report and tables of .config's runs, and the index of all studies, from the directories.

    The table is the one that "make" prints at the end; nothing is trained. It also goes to stdout. The
    files contain all started runs of the study: --steps and --seeds select only what is printed. A run
    that differs from the baseline in more than the changes of its step is not compared; --label-by
    torch,code shows such runs in separate rows.
    """
    plan, whole, selected = asked_tables(options)
    labels = compare.words(options.label_by)
    return results.report(plan, whole, selected=selected, json=options.json, label_by=labels)


def verdicts(options: Namespace) -> tuple[int, str]:
    """Print the verdict on every comparison of .config's study: better, worse, equivalent, or neither.

    kablate verdicts --seeds 1-5

    Each row has the mean difference and half of its 95 % interval over seeds, the number of seeds, and p
    corrected for all comparisons of the study. Writes verdicts.json, the tables and report.html
    beside the runs. Exit codes: 0 whatever the words are, 1 a seed diverged, 2 no run has a result, 4
    runs are not comparable or the A/A step failed, 5 with --strict: a comparison is INCONCLUSIVE.
    """
    plan, whole, selected = asked_tables(options)
    form = {"json": options.json, "strict": options.strict}
    return results.verdicts(plan, whole, selected=selected, **form)


def figures(options: Namespace) -> str:
    """Write the figures of .config's report as PDF, PNG (300 dots per inch) and SVG files.

    kablate figures                        all finished runs
    kablate figures --runs 'pruned-*,0'    selected runs

    The figures are those of report.html: differences with intervals and verdicts, loss curves. They are
    written into the folder "figures" beside the runs, those of selected runs into "figures-selection";
    nothing is trained. Exit code 2 if no run has a result.
    """
    plan, whole, selected = asked_tables(options)
    shown = (plan if selected else whole).only(options.runs)
    # A selection does not replace the figures of all runs.
    folder = SELECTION_FOLDER if selected or options.runs else FIGURES_FOLDER
    study = results.judged_study(whole).of_runs({run.path for run in shown.runs})
    paths = draw_figures(shown, study, folder)
    log("FIGURES", f"{paths[0].parent}: {len(paths)} files")
    return json_document(1, {"files": [str(path) for path in paths]}) if options.json else ""


def check_claims(options: Namespace) -> tuple[int, str]:
    """Check the numbers and words that documents quote against the runs of .config.

    kablate claims --claims docs/claims.toml --out paper

    The claims file lists statements, each with a contrast and its word, or a figure of a step, as
    printed (docs/verdicts.md). If all hold, writes claims.tex and claims.md, by default into the folder
    of the study. Exit codes: 0 all hold, 1 a claim does not hold, 2 the claims file is invalid, 4 runs
    are damaged or not comparable.
    """
    content = claims.read_claims(Path(options.claims or options.build_dir / "claims.toml"))
    if options.seed is None:
        options.seeds = options.seeds or content.get("seeds", "")
    plan = asked_plan(options)
    shown = {run.path for run in plan.runs}
    judged = results.judged_study(table_plan(plan)).of_runs(shown)
    checked = claims.check_claims(content, study_document_of(plan, judged))
    if any(claim["problems"] for claim in checked):
        log("SKIP", f"{' and '.join(_CLAIM_FILES)}: not every claim holds")
    else:
        folder = Path(options.out) if options.out else plan.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, rendered in _CLAIM_FILES.items():
            write_atomic(folder / name, rendered(checked))
            log("CLAIMS", str(folder / name))
    document = {"schema_version": 2, "claims": checked}
    text = pretty_json(document) if options.json else claims.claim_lines(checked)
    return claims.claims_exit_code(checked), text


def audit_runs(options: Namespace) -> tuple[int, str]:
    """Audit runs from their files: VALID, or INVALID with one line per finding.

    kablate audit --runs "ratio/*"                          runs of the plan of .config
    kablate audit --runs results/single/run-s1-1a2b3c4d     a run directory

    Checks that every file exists, is well-formed, matches its digest, and agrees with the values
    recomputed from the other files. Evaluation documents are compared with the data set if it is
    available. Exit codes: 0 all runs are valid, 6 a run is invalid, 2 no such run.
    """
    named = require_value(options.runs, "RUNS", "make audit RUNS=NAME")
    runs = find_started(named, options.build_dir, asked_lookup(options))
    results = [audit(run, options.build_dir) for run in runs]
    code = EXIT_DONE if all(result.valid for result in results) else EXIT_INVALID
    return code, to_json(results) if options.json else to_text(results)


def compare_runs(options: Namespace) -> tuple[int, str]:
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
    result = compare.compare(o.a, o.b, o.build_dir, o.axis, o.label_by, asked_lookup(o))
    columns = None if o.json else console.terminal_columns(sys.stdout)
    text = comparison_to_json(result) if o.json else comparison_to_text(result)
    return EXIT_CODES[result["verdict"]], console.folded(text, columns, CONTINUATION)


def verify_results(options: Namespace) -> int:
    """Check whether finished runs are comparable and can be published together.

    kablate verify-results                            every finished run of .config's study
    kablate verify-results --runs 'ra,baseline'       selected runs, or directories
    kablate verify-results --source wandb             settings as stored by W&B, not the run record
    kablate verify-results --axis COMPILE             directories that may differ in COMPILE

    Prints a Markdown checklist, and the facts to publish if every row is PASS. Settings must be equal
    both in the tracker and in the manifests, except for the changes of the study's steps. Every step
    must have the same seeds, at least FINALIST_MIN_SEEDS. UNKNOWN means not recorded or not available
    here, and never counts as equal. Exit codes: 0 all rows pass, 2 no such run, 3 the tracker cannot be
    read, 4 a row is FAIL or UNKNOWN.
    """
    plan = asked_plan(options)
    ask = tracker(plan, options.source, options.entity)
    study = compare.whole_study(plan)
    table = table_plan(plan)
    records = compare.chosen_runs(plan if selects_runs(options) else table, study, options.runs)
    axes = compare.declared_axes(study, records, options.axis)
    paths = {record.run.path.resolve() for record in records}
    names = {run.path.name for run in table.runs if run.path.resolve() in paths}
    document = study_document_of(table, results.judged_study(table))
    words = word_rows(document, names, plan.folder) if names else ()
    min_seeds = plan.base.repro.finalist_min_seeds
    checklist = verify(records, axes, ask, options.source, min_seeds, words)
    console.show(checklist_to_json(checklist) if options.json else checklist_to_markdown(checklist))
    log_failing(checklist["rows"])
    return int(checklist["exit_code"])
