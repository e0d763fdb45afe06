"""The checklist of ``make verify-results``: its rows and renderings, and the rows about a study's words.

A fact that was not recorded is UNKNOWN, which does not pass.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.console import log
from lib.json_files import RecordError, read_json_object
from lib.report.render import json_document, markdown_table
from lib.report.study import SCHEMA_VERSION, VERDICTS_FILE
from lib.units import first_of

_SCHEMA_VERSION = 2
_MAX_REASONS_SHOWN = 8
_MAX_VALUE_CHARS = 48
PASS, FAIL, UNDECIDED = "PASS", "FAIL", "UNKNOWN"
_DECIDED = ("BETTER", "WORSE")

Values = Mapping[str, Any]
# Keys: ``source`` (the tracker), ``runs``, ``rows`` and ``exit_code``.
Checklist = Mapping[str, Any]


class CheckRow(NamedTuple):
    """One check: its word, explanation, affected runs and a command to run."""

    check: str
    verdict: str
    what: str
    runs: Sequence[str] = ()
    next: str = ""


class CheckRemark(NamedTuple):
    """A reason why a check does not pass, FAIL or UNKNOWN, and the run that causes it."""

    verdict: str
    what: str
    run: str = ""


def check_row(check: str, said: str, remarks: Iterable[CheckRemark], next: str = "") -> CheckRow:
    """Return a row: FAIL if any remark is FAIL, else UNKNOWN if any is, else PASS with ``said``."""
    causes = list(remarks)
    if not causes:
        return CheckRow(check, PASS, said)
    reasons = list(dict.fromkeys(remark.what for remark in causes))
    more = len(reasons) - _MAX_REASONS_SHOWN
    what = "; ".join(reasons[:_MAX_REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    runs = [run for run in dict.fromkeys(remark.run for remark in causes) if run]
    failed = any(remark.verdict == FAIL for remark in causes)
    return CheckRow(check, FAIL if failed else UNDECIDED, what, runs, next)


def values_by_run_text(values: Iterable[tuple[str, Any]]) -> str:
    """Return (run, value) pairs as ``2 (a, b), 4 (c)``; only the value if all runs share it."""
    grouped: dict[str, list[str]] = {}
    for run, value in values:
        grouped.setdefault(value_text(value), []).append(run)
    if len(grouped) == 1:
        return next(iter(grouped))
    return ", ".join(f"{value} ({first_of(runs)})" for value, runs in grouped.items())


def value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def failing_rows(rows: Iterable[CheckRow]) -> list[CheckRow]:
    return [row for row in rows if row.verdict != PASS]


def checklist_to_markdown(checklist: Checklist) -> str:
    rows, failing = checklist["rows"], len(failing_rows(checklist["rows"]))
    title = f"# Verification of {len(checklist['runs'])} run(s), tracker: {checklist['source']}"
    cells = [(row.check, row.verdict, row.what) for row in rows]
    table = markdown_table(("check", "verdict", "what"), cells, left=range(3))
    said = f"\nNot publishable: {failing} of {len(rows)} rows do not pass.\n" if failing else ""
    return f"{title}\n\n{table}{said}"


def checklist_to_json(checklist: Checklist) -> str:
    rows = [row._asdict() for row in checklist["rows"]]
    return json_document(_SCHEMA_VERSION, {**checklist, "rows": rows})


def log_failing(rows: Iterable[CheckRow]) -> None:
    """Log the reason of each row that does not pass, once, with the rows and a command to run."""
    by_reason: dict[tuple[str, str], list[CheckRow]] = {}
    for row in failing_rows(rows):
        by_reason.setdefault((row.verdict, row.what), []).append(row)
    for (verdict, what), same_reason in by_reason.items():
        names = ", ".join(row.check for row in same_reason)
        advice = next((row.next for row in same_reason if row.next), "")
        advice = advice and f"\n        {advice}"
        log("REFUSE" if verdict == FAIL else verdict, f"{names}: {what}{advice}")


# Rows from the study's document: what its table says about the runs to publish.


def word_rows(document: Values, names: Collection[str], folder: Path) -> list[CheckRow]:
    """Return the rows about the runs in directories ``names`` of the study in ``folder``."""
    runs = [run for run in document["runs"] if run["folder"] in names]
    arms = {run["variant"] for run in runs}
    verdicts = [v for v in document["verdicts"] if arms >= v["weights"].keys()]
    words = Counter(verdict["verdict"] for verdict in verdicts)
    counts = ", ".join(f"{count} {word}" for word, count in words.items())
    unstable, diverged = (
        [CheckRemark(FAIL, f"{r['label']} {said}", r["folder"]) for r in runs if r[field]]
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


def _open(verdicts: list[Values], least: int) -> Iterator[CheckRemark]:
    """Yield a remark for each comparison without a word, and for each that is not fair."""
    for verdict in verdicts:
        name, reason = verdict["name"], verdict["reason"]
        if verdict["verdict"] is None:
            seeds = f"{verdict['n']} of at least {least} seeds"
            why = seeds if verdict["n"] < least else reason or "the look is not taken"
            yield CheckRemark(UNDECIDED, f"{name}: no word, {why}")
        elif verdict["verdict"] == "INCONCLUSIVE":
            more = verdict["more_seeds"]
            needed = f", about {more} more seeds give a word" if more else ""
            yield CheckRemark(UNDECIDED, f"{name}: INCONCLUSIVE{needed}")
        elif verdict["verdict"] == "UNFAIR":
            yield CheckRemark(FAIL, f"{name}: UNFAIR, {reason}")


def _aa_row(document: Values, arms: Collection[str]) -> CheckRow:
    """Return the row of the A/A steps, which have no effect by construction."""
    words = [(s["name"], s["verdict"]) for s in document["aa_steps"] if s["step"] in arms]
    remarks = [CheckRemark(FAIL, f"{n}: {word}") for n, word in words if word in _DECIDED]
    if document["aa_failed"] and not remarks:
        remarks = [CheckRemark(FAIL, "an A/A step failed at an earlier look")]
    remarks += [CheckRemark(UNDECIDED, f"{name}: no word") for name, word in words if not word]
    seeds = sorted({run["seed"] for run in document["runs"]})
    more = f"{seeds[-1] + 1}-{seeds[-1] + len(seeds)}" if seeds else "1-3"
    advice = (
        "one of 20 studies has this by chance: search for what differs between its runs, then train the "
        f"study with other seeds (make SEEDS={more}), and publish both"
    )
    passed = "no effect where there is none" if words else "no run of one"
    return check_row("A/A step", passed, remarks, advice)


def _outdated(
    document: Values, runs: list[Values], verdicts: list[Values], file: Path
) -> Iterator[CheckRemark]:
    """Yield how the written document, which is compared only, differs from that of today's runs."""
    now, then = _results(document), None
    try:
        written = read_json_object(file)
        if written["schema_version"] == SCHEMA_VERSION:
            then = _results(written)
    except RecordError as error:
        yield CheckRemark(UNDECIDED, f"{file}: {error.problems[0].what}")
        return
    except (KeyError, TypeError):
        then = None
    if then is None:
        yield CheckRemark(UNDECIDED, f"{file} is of another version, or damaged")
        return
    compared = [(run["folder"], run["label"], run["folder"]) for run in runs]
    compared += [(verdict["name"], verdict["name"], "") for verdict in verdicts]
    for key, label, run in compared:
        if then.get(key) != now[key]:
            yield CheckRemark(FAIL, f"{label}: another result in {VERDICTS_FILE}", run)
    variants = {run["variant"] for run in runs}
    for run in written["runs"]:
        gone = run["folder"] not in now or now[run["folder"]][1] is None
        if gone and run["variant"] in variants and run.get("run_id"):
            what = f"{VERDICTS_FILE} rests on {run['folder']}, which has no result"
            yield CheckRemark(FAIL, what, run["folder"])


def _results(document: Values) -> dict[str, list[Any]]:
    """Return what a second training changes. Raises KeyError or TypeError if damaged."""
    names = ("configuration", "run_id", "commit", "weights")
    runs = {run["folder"]: [{**run}.get(k) for k in names] for run in document["runs"]}
    verdicts = {v["name"]: [v["verdict"], v["difference"], v["n"]] for v in document["verdicts"]}
    return {**runs, **verdicts}
