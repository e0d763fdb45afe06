"""Claims: numbers and words as a paper prints them, in a TOML file, against the study's document.

A value is text, so that its digits count. A claim whose runs are not all there does not hold.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_COMPARABLE, ConfigError, Problem, nearest
from lib.report.columns import VERDICTS, origin
from lib.report.render import latex_table, latex_text, markdown_table, visible
from lib.report.text import Document
from lib.toml_files import TomlEntries

_FILE = {"study": str, "seeds": str, "claim": list}
_KEYS = ("name", "text", "contrast", "verdict", "step", "field", "value", "document")
_REQUIRED = {"contrast": ("name", "text", "verdict"), "step": ("name", "text", "field", "value")}
_FORMS = {
    "name": (r"[a-z]+(-[a-z]+)*", "lower-case letters, joined by -"),
    "verdict": ("BETTER|WORSE|EQUIVALENT|INCONCLUSIVE|DIVERGED", "a word of a verdict"),
    "value": (r"[-+]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?", "a number such as -0.0062 or 122,880"),
}
_COLUMNS = VERDICTS[2:]
_HEADER = ("claim", "value", *(column.heading for column in _COLUMNS))

Claim = dict[str, Any]


def read_claims(path: Path) -> dict[str, Any]:
    """Return the content of a claims file. Raises ConfigError with every problem and its line."""
    file = TomlEntries(path, "claim", "claims", "see docs/verdicts.md, Claims")
    file.keys(file.content, _FILE, None)
    entries = file.entries() or []
    names = [entry.get("name") for entry in entries]
    for index, entry in enumerate(entries):
        file.keys(entry, dict.fromkeys(_KEYS, str), index)
        for key in _REQUIRED["contrast" if "contrast" in entry else "step"]:
            if key not in entry:
                file.note(f"{key}: missing", "missing-key", index)
        if ("contrast" in entry) == ("step" in entry):
            file.note("expected either contrast or step", "missing-key", index)
        for key, (form, expected) in _FORMS.items():
            if key in entry and not re.fullmatch(form, str(entry[key])):
                what = f"{key}: invalid {entry[key]!r} (expected {expected})"
                file.note(what, "invalid-form", index, key)
        if names[index] in names[:index]:
            file.note(f"name: duplicate {names[index]!r}", "duplicate", index, "name")
    if not entries:
        file.note("no claim (expected at least one [[claim]])", "empty", None)
    if file.problems:
        raise ConfigError(*file.problems)
    claims = [{**entry, "where": file.where(index)} for index, entry in enumerate(entries)]
    return {**file.content, "path": path, "claims": claims}


def check_claims(content: Mapping[str, Any], document: Document) -> list[Claim]:
    """Return each entry with its runs and the ``problems`` why it does not hold."""
    if content.get("study", document["study"]) != document["study"]:
        what = f"study: the claims are on {content['study']} (.config plans {document['study']})"
        raise ConfigError(Problem(what, str(content["path"]), code="claims.other-study"))
    return [_checked(entry, document, content["path"].parent) for entry in content["claims"]]


def _checked(entry: Mapping[str, str], document: Document, folder: Path) -> Claim:
    verdict, problems = None, []
    if "contrast" in entry:
        verdict = _named("contrast", entry, {v["name"]: v for v in document["verdicts"]})
        arms, seeds, found = verdict["weights"], verdict["seeds"], verdict["difference"]
        if verdict["verdict"] != entry["verdict"]:
            actual = f"{verdict['verdict'] or 'none'} ({verdict['reason'] or ''})"
            problems.append(f"verdict: required {entry['verdict']}, found {actual}")
    else:
        row = _named("step", entry, {row["name"]: row for row in document["rows"]})
        figures = {**row, **row["machine"]}
        numbers = {k: v for k, v in figures.items() if v is None or type(v) in (int, float)}
        arms, seeds, found = [row["slug"]], [], _named("field", entry, numbers)
    runs = [run for run in document["runs"] if run["variant"] in arms]
    damaged = [run for run in runs if run["state"].startswith(("damaged", "not comparable"))]
    runs = [run for run in runs if run["seed"] in seeds or not seeds]
    absent = [run for run in runs if run["val_loss"] is None and not run["diverged"]]
    lacking = [*damaged, *(run for run in absent if run not in damaged)]
    problems += [f"{r['folder']}: {r['state']} {r['reason']}".strip() for r in lacking]
    problems += _misquotes(entry, found, folder) if runs else ["no run of it is planned"]
    claim = {"entry": entry, "runs": runs, "problems": problems, "verdict": verdict}
    is_unfair = verdict is not None and verdict["verdict"] == "UNFAIR"
    return {**claim, "damaged": bool(damaged) or is_unfair}


def _named(kind: str, entry: Mapping[str, str], known: Mapping[str, Any]) -> Any:
    if entry[kind] in known:
        return known[entry[kind]]
    what = f"{kind}: {entry[kind]!r} is not in the study{nearest(entry[kind], known)}"
    next_ = "type: make report JSON=1"
    raise ConfigError(Problem(what, entry["where"], next_, code=f"claims.unknown-{kind}"))


def _misquotes(entry: Mapping[str, str], found: float | None, folder: Path) -> list[str]:
    """Return a problem if the quoted value is not ``found``, or not in the document of the claim."""
    problems, quoted = [], entry.get("value", "")
    # With the digits of the quoted one, and its sign.
    form = f"{'+' * quoted.startswith('+')},.{len(quoted.partition('.')[2])}f"
    actual = "none" if found is None else format(found, form)
    if quoted and actual != quoted:
        problems.append(f"value: quoted {quoted}, found {actual}")
    if quoted and "document" in entry:
        text = (folder / entry["document"]).read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"(?<![\w.,+−-]){re.escape(quoted)}(?!\w|[.,]\w)", text):
            problems.append(f"{entry['document']} does not quote {quoted}")
    return problems


def claims_exit_code(claims: Sequence[Claim]) -> int:
    if any(claim["damaged"] for claim in claims):
        return EXIT_NOT_COMPARABLE
    return EXIT_FAILED if any(claim["problems"] for claim in claims) else EXIT_DONE


def claim_lines(claims: Sequence[Claim]) -> str:
    lines = []
    for entry, problems in ((claim["entry"], claim["problems"]) for claim in claims):
        said = " ".join(entry[key] for key in ("value", "verdict") if key in entry)
        failed = [f"FAIL    {entry['name']}: {text} ({entry['where']})" for text in problems]
        lines += failed or [f"HOLDS   {entry['name']}: {said}"]
    return "".join(f"{visible(line)}\n" for line in lines)


def _cells(claim: Claim) -> list[str]:
    entry, verdict = claim["entry"], claim["verdict"]
    figures = ["-", str(len(claim["runs"])), "-", "-"]
    if verdict is not None:
        figures = [column.text(verdict) for column in _COLUMNS if column.text]
    return [entry["text"], entry.get("value", "-"), *figures]


def claims_to_markdown(claims: Sequence[Claim]) -> str:
    origins = [origin(c["entry"]["name"], c["runs"]).replace("--", "- -") for c in claims]
    table = markdown_table(_HEADER, map(_cells, claims), left=(0, 5))
    return "".join([f"{table}\n", *(f"<!-- {each} -->\n" for each in origins)])


def claims_to_latex(claims: Sequence[Claim]) -> str:
    """Return a command for each number or word, and ``claimstable``; origins are in comments."""
    text = "% Generated by make claims. In the preamble: \\usepackage{booktabs}, \\input{claims}.\n"
    for claim in claims:
        entry = claim["entry"]
        command = "claim" + "".join(word.capitalize() for word in entry["name"].split("-"))
        text += f"% {origin(entry['name'], claim['runs'])}\n"
        text += (
            f"\\newcommand{{\\{command}}}{{{latex_text(entry.get('value') or entry['verdict'])}}}\n"
        )
    table = latex_table(_HEADER, map(_cells, claims), left=(0, 5))
    return f"{text}\\newcommand{{\\claimstable}}{{%\n{table.rstrip()}}}\n"
