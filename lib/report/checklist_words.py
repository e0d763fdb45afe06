"""Rows of the checklist from the study's document: what its table says about the runs to publish.

Stability, divergences, open comparisons, A/A steps, and whether the written document is about the runs
that are there now.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.json_files import RecordError, read_json_object
from lib.report.checklist import CheckRemark, CheckRow, CheckVerdict, check_row
from lib.report.study import SCHEMA_VERSION
from lib.report.study_verdicts import VERDICTS_FILE

Document = Mapping[str, Any]
# A run that was trained again has another of these.
_IDENTITY = ("configuration", "run_id", "commit", "weights")
_FAIL, _UNKNOWN = CheckVerdict.FAIL, CheckVerdict.UNKNOWN


def word_rows(document: Document, names: Collection[str], folder: Path) -> list[CheckRow]:
    """Return the rows about the runs in directories ``names`` of the study in ``folder``."""
    runs = [run for run in document["runs"] if run["folder"] in names]
    arms = {run["variant"] for run in runs}
    verdicts = [v for v in document["verdicts"] if arms >= v["values"].keys()]
    words = Counter(verdict["verdict"] for verdict in verdicts)
    counts = ", ".join(f"{count} {word}" for word, count in words.items())
    unstable, diverged = (
        [CheckRemark(_FAIL, f"{r['label']} {said}", r["folder"]) for r in runs if r[field]]
        for field, said in (("unstable", "is unstable"), ("diverged", "diverged"))
    )
    return [
        check_row(
            "stability",
            "no jump of loss or gradient",
            unstable,
            "type: make report, and see UNSTABLE; a longer warm-up or a smaller LEARNING_RATE helps",
        ),
        check_row("divergence", "no seed diverged", diverged, "type: make report"),
        check_row(
            "verdicts",
            counts or "no comparison",
            _open(verdicts, document["rule"]["min_seeds"]),
            "type: make verdicts, which names the seeds that give a word; to publish without a step, "
            "name the others: RUNS=",
        ),
        _aa_row(document, arms),
        check_row(
            "document",
            f"{VERDICTS_FILE} is about these runs",
            _outdated(document, runs, verdicts, folder / VERDICTS_FILE),
            "type: make report",
        ),
    ]


def _open(verdicts: list[Document], least: int) -> Iterator[CheckRemark]:
    """Yield a remark for each comparison without a word, and for each that is not fair."""
    for verdict in verdicts:
        name, reason = verdict["name"], verdict["reason"]
        if verdict["verdict"] is None:
            seeds = f"{verdict['n']} of at least {least} seeds"
            why = seeds if verdict["n"] < least else reason or "the look is not taken"
            yield CheckRemark(_UNKNOWN, f"{name}: no word, {why}")
        elif verdict["verdict"] == "INCONCLUSIVE":
            more = verdict["more_seeds"]
            needed = f", about {more} more seeds give a word" if more else ""
            yield CheckRemark(_UNKNOWN, f"{name}: INCONCLUSIVE{needed}")
        elif verdict["verdict"] == "UNFAIR":
            yield CheckRemark(_FAIL, f"{name}: UNFAIR, {reason}")


def _aa_row(document: Document, arms: Collection[str]) -> CheckRow:
    """Return the row of the A/A steps, which have no effect by construction."""
    steps = [step for step in document["aa_steps"] if step["step"] in arms]
    failed = [step for step in steps if step["verdict"] in ("BETTER", "WORSE")]
    remarks = [CheckRemark(_FAIL, f"{step['name']}: {step['verdict']}") for step in failed]
    if document["aa_failed"] and not failed:
        remarks = [CheckRemark(_FAIL, "an A/A step failed at an earlier look")]
    remarks += [
        CheckRemark(_UNKNOWN, f"{step['name']}: no word") for step in steps if not step["verdict"]
    ]
    seeds = sorted({run["seed"] for run in document["runs"]})
    more = f"{seeds[-1] + 1}-{seeds[-1] + len(seeds)}" if seeds else "1-3"
    advice = (
        "one of 20 studies has this by chance: search for what differs between its runs, then train the "
        f"study with other seeds (make SEEDS={more}), and publish both"
    )
    passed = "no effect where there is none" if steps else "no run of one"
    return check_row("A/A step", passed, remarks, advice)


def _outdated(
    document: Document, runs: list[Document], verdicts: list[Document], file: Path
) -> Iterator[CheckRemark]:
    """Yield how the written document differs from ``document``, computed from the runs of today.

    The written one is compared only: no word or figure is taken from it.
    """
    try:
        written = read_json_object(file)
    except RecordError as error:
        yield CheckRemark(_UNKNOWN, f"{file}: {error.problems[0].what}")
        return
    if written.get("schema_version") != SCHEMA_VERSION:
        yield CheckRemark(_UNKNOWN, f"{file} is of another version, or damaged")
        return
    before = {each["folder"]: each for each in _entries(written, "runs", "folder")}
    for run in runs:
        then = before.get(run["folder"], {})
        if changed := [name for name in _IDENTITY if then.get(name) != run.get(name)]:
            what = f"another {', '.join(changed)}" if then.get("run_id") else "no result"
            yield CheckRemark(
                CheckVerdict.FAIL, f"{run['label']}: {what} in {VERDICTS_FILE}", run["folder"]
            )
    now = {run["folder"] for run in document["runs"] if run["state"] == "done"}
    variants = {run["variant"] for run in runs}
    for name, then in before.items():
        if name not in now and then.get("variant") in variants and then.get("run_id"):
            yield CheckRemark(
                CheckVerdict.FAIL, f"{VERDICTS_FILE} rests on {name}, which has no result", name
            )
    figures = {each["name"]: each for each in _entries(written, "verdicts", "name")}
    for verdict in verdicts:
        then = figures.get(verdict["name"], {})
        if any(then.get(part) != verdict[part] for part in ("verdict", "difference", "n")):
            yield CheckRemark(
                CheckVerdict.FAIL, f"{verdict['name']}: another result in {VERDICTS_FILE}"
            )


def _entries(written: Document, part: str, key: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a file that may be damaged, those with a name."""
    entries = written.get(part)
    objects = entries if isinstance(entries, list) else []
    return [each for each in objects if isinstance(each, dict) and isinstance(each.get(key), str)]
