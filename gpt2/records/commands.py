"""The commands that show what the runs of a study have given: report, verdicts, figures, claims."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from gpt2.records.compare import words
from gpt2.records.named import report_named
from gpt2.running.results import StudyResults, read_results, write_results
from gpt2.study.arguments import asked_plan, asked_tables
from gpt2.study.plan import table_plan
from lib.console import log
from lib.errors import ConfigError, Problem
from lib.files import pretty_json, write_atomic
from lib.report import claims
from lib.report.columns import to_json, verdicts_to_terminal
from lib.report.figures import FIGURES_FOLDER, write_figures
from lib.report.page import REPORT_FILE
from lib.report.plots import study_figures, study_series
from lib.report.render import json_document
from lib.report.text import verdicts_exit_code

_CLAIM_FILES = {"claims.tex": claims.claims_to_latex, "claims.md": claims.claims_to_markdown}


def report(options: Namespace) -> str:
    """Write report and tables of .config's runs, and the index of all studies, from the directories.

    The table is the one that "make" prints at the end; nothing is trained. It also goes to stdout. The
    files contain all started runs of the study: --steps and --seeds select only what is printed. A run
    that differs from the baseline in more than the changes of its step is not compared; --label-by
    torch,code shows such runs in separate rows. --run results/ratio/*-1a2b3c4d reports the runs of these
    directories, of any configuration and code, as they recorded it: docs/results.md.
    """
    if options.run:
        return report_named(options)
    return _published(options, words(options.label_by)).text(json=options.json)


def verdicts(options: Namespace) -> tuple[int, str]:
    """Print the verdict on every comparison of .config's study: better, worse, equivalent, or neither.

    kablate verdicts --seeds 1-5

    Each row has the mean difference and half of its 95 % interval over seeds, the number of seeds, and p
    corrected for all comparisons of the study. Writes verdicts.json, the tables and report.html
    beside the runs. Exit codes: 0 whatever the words are, 1 a seed diverged, 2 no run has a result, 4
    runs are not comparable or the A/A step failed, 5 with --strict: a comparison is INCONCLUSIVE.
    """
    results = _published(options)
    document, plan = results.document, results.plan
    log("REPORT", str(plan.folder / REPORT_FILE))
    # The files are written, so that no word of other runs is left.
    if not any(run["state"] == "done" or run["diverged"] for run in document["runs"]):
        advice = "type: make, to train the runs, or make status, to see their states"
        raise ConfigError(Problem("no run has a result", plan.study, advice, code="run.not-found"))
    # Such as a damaged run, whose seed then has no result.
    for note in document["notes"]:
        log("NOTE", note)
    text = to_json(document) if options.json else verdicts_to_terminal(document)
    return verdicts_exit_code(document, strict=options.strict), text


def _published(options: Namespace, label_by: Sequence[str] = ()) -> StudyResults:
    """Write table and report of all runs of the study. Return the results to show."""
    plan, whole, selected = asked_tables(options)
    # Seeds that are only in the folder are no declaration of a look.
    declares = {run.seed for run in plan.runs} >= {run.seed for run in whole.runs}
    results = write_results(whole, label_by, looks=declares and not label_by)
    results.publish()
    return results.of(plan) if selected else results


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
    folder = FIGURES_FOLDER + "-selection" * bool(selected or options.runs)
    results = read_results(whole).of(shown)
    drawn = study_figures(results.document, study_series(results.study))
    if not drawn:
        raise ConfigError(Problem("no run has a result", next="type: make", code="run.not-found"))
    paths = write_figures(drawn, shown.folder / folder)
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
    checked = claims.check_claims(content, read_results(table_plan(plan)).of(plan).document)
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
