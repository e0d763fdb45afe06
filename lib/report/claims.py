"""Claims: numbers and words as a paper prints them, in a TOML file, against the study's document.

docs/verdicts.md, Claims, has the format. A value is text, so that its digits count. A claim whose runs
are not all there does not hold.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
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
_SCALES = {"": 0, "k": 3, "M": 6, "G": 9, "%": -2}
_NUMBER = re.compile(
    r"(?P<number>[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)(?P<scale>[kMG%]?)"
    r"(?: (?:nats|tokens|parameters|tok/s|s))?"
)
_FORMS = {
    "name": (re.compile(r"[A-Za-z]+(-[A-Za-z]+)*"), "letters, joined by -"),
    "verdict": (re.compile("BETTER|WORSE|EQUIVALENT|INCONCLUSIVE|DIVERGED"), "a word of a verdict"),
    "value": (_NUMBER, "a number such as -0.0062, 47.5% or 7.9k tok/s"),
}
_COLUMNS = VERDICTS[2:]
_HEADER = ("claim", "value", *(column.heading for column in _COLUMNS))


# Keys: ``entry`` of the file, ``runs`` behind it, ``problems`` if it does not hold, ``damaged`` if a run
# is damaged or not comparable, and ``verdict``, None for a figure of a step.
CheckedClaim = dict[str, Any]


def read_claims(path: Path) -> dict[str, Any]:
    """Return the content of a claims file. Raises ConfigError with every problem and its line."""
    file = TomlEntries(path, "claim", "claims", "see docs/verdicts.md, Claims")
    file.keys(file.content, _FILE, None)
    commands: set[str] = set()
    entries = file.entries() or []
    for index, entry in enumerate(entries):
        file.keys(entry, dict.fromkeys(_KEYS, str), index)
        required = _REQUIRED["contrast" if "contrast" in entry else "step"]
        for key in [key for key in required if key not in entry]:
            file.note(f"{key}: missing", "missing-key", index)
        if ("contrast" in entry) == ("step" in entry):
            file.note("expected either contrast or step", "missing-key", index)
        for key, (form, expected) in _FORMS.items():
            if key in entry and not form.fullmatch(str(entry[key])):
                what = f"{key}: invalid {entry[key]!r} (expected {expected})"
                file.note(what, "invalid-form", index, key)
        if (command := _command(entry)) in commands:
            file.note(f"name: duplicate (\\{command} in LaTeX)", "duplicate", index, "name")
        commands.add(command)
    if not entries:
        file.note("no claim (expected at least one [[claim]])", "empty", None)
    if file.problems:
        raise ConfigError(*file.problems)
    claims = [{**entry, "where": file.where(index)} for index, entry in enumerate(entries)]
    return {**file.content, "path": path, "claims": claims}


def check_claims(content: Mapping[str, Any], document: Document) -> list[CheckedClaim]:
    """Check every claim. Raises ConfigError for a claim on what the study does not have."""
    if content.get("study", document["study"]) != document["study"]:
        what = f"study: the claims are on {content['study']} (.config plans {document['study']})"
        raise ConfigError(Problem(what, str(content["path"]), code="claims.other-study"))
    return [_checked(entry, document, content["path"].parent) for entry in content["claims"]]


def _checked(entry: Mapping[str, str], document: Document, folder: Path) -> CheckedClaim:
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
    problems += [f"{run['folder']}: {run['state']}: {run['reason']}" for run in damaged]
    absent = [run["folder"] for run in runs if run["val_loss"] is None and not run["diverged"]]
    if absent or not runs:
        problems.append(f"runs without a result: {', '.join(absent) or 'all'}")
    if "value" in entry and not (found is not None and holds(entry["value"], found)):
        problems.append(f"value: quoted {entry['value']}, found {found!r}")
    problems += _unquoted(entry, folder)
    is_damaged = bool(damaged) or (verdict is not None and verdict["verdict"] == "UNFAIR")
    claim = {"entry": entry, "runs": runs, "problems": problems, "verdict": verdict}
    return {**claim, "damaged": is_damaged}


def _named(kind: str, entry: Mapping[str, str], known: Mapping[str, Any]) -> Any:
    if entry[kind] in known:
        return known[entry[kind]]
    what = f"{kind}: {entry[kind]!r} is not in the study{nearest(entry[kind], known)}"
    next_ = "type: make report JSON=1"
    raise ConfigError(Problem(what, entry["where"], next_, code=f"claims.unknown-{kind}"))


def holds(quoted: str, recorded: float) -> bool:
    """Return whether ``recorded`` lies within half a unit of the last digit of a quoted number.

    A signed zero must have the sign of the record.
    """
    match = _NUMBER.fullmatch(quoted)
    assert match is not None
    number = Decimal(match["number"].replace(",", "").replace("−", "-"))
    number, exact = number.scaleb(_SCALES[match["scale"]]), Decimal(repr(recorded))
    is_signed_zero = number == 0 and not match["number"][0].isdigit()
    if is_signed_zero and exact and number.is_signed() != exact.is_signed():
        return False
    return abs(exact - number) <= Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)


def _unquoted(entry: Mapping[str, str], folder: Path) -> list[str]:
    """Return the document of the claim as a problem if its number does not occur there."""
    match = _NUMBER.fullmatch(entry.get("value", ""))
    if "document" not in entry or match is None:
        return []
    text = (folder / entry["document"]).read_text(encoding="utf-8", errors="replace")
    number = match["number"] + match["scale"]
    quoted = re.search(rf"(?<![\w.,+−-]){re.escape(number)}(?![\w]|[.,]\w)", text)
    return [] if quoted else [f"{entry['document']} does not quote {number}"]


def claims_exit_code(claims: Sequence[CheckedClaim]) -> int:
    """Return 4 if a run is damaged or not comparable, 1 if a claim does not hold, else 0."""
    if any(claim["damaged"] for claim in claims):
        return EXIT_NOT_COMPARABLE
    return EXIT_FAILED if any(claim["problems"] for claim in claims) else EXIT_DONE


def claim_lines(claims: Sequence[CheckedClaim]) -> str:
    """Return a line for each claim that holds, and one for each reason why another does not."""
    lines = []
    for claim in claims:
        entry = claim["entry"]
        shown = f"{entry.get('value', '')} {entry.get('verdict', '')}".strip()
        failed = [f"FAIL    {entry['name']}: {t} ({entry['where']})" for t in claim["problems"]]
        lines += failed or [f"HOLDS   {entry['name']}: {shown}"]
    return "".join(f"{visible(line)}\n" for line in lines)


def _cells(claim: CheckedClaim) -> list[str]:
    entry, verdict = claim["entry"], claim["verdict"]
    figures = ["-", str(len(claim["runs"])), "-", "-"]
    if verdict is not None:
        figures = [column.text(verdict) for column in _COLUMNS if column.text]
    return [entry["text"], entry.get("value", "-"), *figures]


def claims_to_markdown(claims: Sequence[CheckedClaim]) -> str:
    """Return a Markdown table, and in comments the origin of each number."""
    text = f"{markdown_table(_HEADER, map(_cells, claims), left=(0, 5))}\n"
    for claim in claims:
        comment = origin(claim["entry"]["name"], claim["runs"]).replace("--", "- -")
        text += f"<!-- {comment} -->\n"
    return text


def claims_to_latex(claims: Sequence[CheckedClaim]) -> str:
    """Return a command for each number or word, and ``claimstable``; origins are in comments."""
    text = "% Generated by make claims. In the preamble: \\usepackage{booktabs}, \\input{claims}.\n"
    for claim in claims:
        number = latex_text(claim["entry"].get("value") or claim["entry"]["verdict"])
        text += f"% {origin(claim['entry']['name'], claim['runs'])}\n"
        text += f"\\newcommand{{\\{_command(claim['entry'])}}}{{{number}}}\n"
    table = latex_table(_HEADER, map(_cells, claims), left=(0, 5))
    return f"{text}\\newcommand{{\\claimstable}}{{%\n{table.rstrip()}}}\n"


def _command(entry: Mapping[str, str]) -> str:
    return "claim" + "".join(w[:1].upper() + w[1:] for w in str(entry.get("name")).split("-"))
