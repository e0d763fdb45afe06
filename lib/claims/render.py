"""Checked claims as lines, JSON, LaTeX and Markdown, with the provenance of each number."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lib.claims.check import ClaimedRun, ClaimResult
from lib.claims.file import ClaimsFile
from lib.claims.quote import QuotedNumber
from lib.errors import ConfigError, Problem
from lib.report.render import json_document, markdown_table
from lib.report.verdict_text import format_p

SCHEMA_VERSION = 1
_COMMENT_COLUMNS = 96
_COMMIT_DIGITS = 12
# Digits of a difference that no document quotes.
_SHOWN = QuotedNumber.parse("+0.0000", "nats")

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
    "|": r"\ensuremath{|}",
    # A quotation mark that LaTeX's old font encoding has too.
    '"': "{''}",
    "'": r"{'}",
    "`": r"{`}",
    "−": r"\ensuremath{-}",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "·": r"\ensuremath{\cdot}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "≈": r"\ensuremath{\approx}",
    "→": r"\ensuremath{\rightarrow}",
    "²": r"\ensuremath{^2}",
    "√": r"\ensuremath{\surd}",
    "Δ": r"\ensuremath{\Delta}",
    "α": r"\ensuremath{\alpha}",
    "β": r"\ensuremath{\beta}",
    "λ": r"\ensuremath{\lambda}",
    "µ": r"\ensuremath{\mu}",
    "μ": r"\ensuremath{\mu}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "‘": r"\textquoteleft{}",
    "’": r"\textquoteright{}",
    "…": r"\dots{}",
    "\u00a0": "~",
}
_LATIN = "äöüÄÖÜßàáâçèéêëìíîïñòóôùúûÀÁÂÇÈÉÊËÌÍÎÏÑÒÓÔÙÚÛåÅøØæÆ"


def latex_text(text: str) -> str:
    """Return ``text`` as LaTeX that prints exactly it.

    Raises ValueError with the first character that LaTeX might not print.
    """
    escaped = "".join(_latex_character(character) for character in text)
    # Two hyphens or commas in a row would print as one other character.
    return re.sub(r"([-,])(?=\1)", r"\1{}", escaped)


def _latex_character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if (character.isascii() and character.isprintable()) or character in _LATIN:
        return character
    raise ValueError(character)


def require_latex(file: ClaimsFile) -> None:
    """Raise ConfigError for each claim whose text LaTeX might not print."""
    problems = []
    for claim in file.claims:
        try:
            latex_text(f"{claim.text}{claim.subject}")
        except ValueError as error:
            what = f"text: character {error.args[0]!r} has no LaTeX form"
            advice = "write it in ASCII"
            problems.append(Problem(what, claim.where, advice, code="claims.unsupported-character"))
    if problems:
        raise ConfigError(*problems)


def claim_lines(results: Sequence[ClaimResult]) -> str:
    """Return one line for each claim that holds, and one for each reason why another does not."""
    lines = []
    for result in results:
        claim = result.claim
        if result.holds:
            parts = [claim.value.text] if claim.value else []
            parts += [claim.verdict] if claim.verdict else []
            lines.append(f"HOLDS   {claim.name}: {' '.join(parts)}")
        for problem in result.problems:
            lines.append(f"FAIL    {claim.name}: {problem}")
        if not result.holds:
            lines.append(f"        {claim.where}, {claim.subject}")
    return "".join(f"{line}\n" for line in lines)


def claims_to_json(file: ClaimsFile, results: Sequence[ClaimResult], written: Sequence[str]) -> str:
    """Return the checked claims as one JSON document with sorted keys."""
    document = {
        "file": str(file.path),
        "claims": [_claim_record(result) for result in results],
        "written": list(written),
    }
    return json_document(SCHEMA_VERSION, document)


def _claim_record(result: ClaimResult) -> dict[str, Any]:
    claim, verdict = result.claim, result.verdict
    word = verdict.word.value if verdict and verdict.is_given else None
    return {
        "name": claim.name,
        "text": claim.text,
        "where": claim.where,
        "contrast": claim.contrast or None,
        "cell": claim.cell and claim.cell.name,
        "holds": result.holds,
        "damaged": result.damaged,
        "problems": list(result.problems),
        "quoted": claim.value and claim.value.text,
        "found": result.value,
        "required_verdict": claim.verdict or None,
        "found_verdict": word,
        "digest": result.digest or None,
        "runs": [vars(run) for run in result.runs],
    }


def claims_to_markdown(file: ClaimsFile, results: Sequence[ClaimResult]) -> str:
    """Return the claims as a Markdown table, and their provenance in comments."""
    header = ["claim", "value", "95 % interval", "n", "p", "verdict"]
    rows = []
    for result in results:
        figures = _figures(result)
        value = result.claim.value.text if result.claim.value else "-"
        interval = f"[{figures['Low']}, {figures['High']}]" if figures["Low"] else "-"
        cells = [figures[name] or "-" for name in ("N", "P", "Verdict")]
        plain = re.sub(r"([\\`*_<>\[\]#~$&])", r"\\\1", result.claim.text)
        rows.append([plain, value, interval, *cells])
    text = f"<!-- Generated by make claims from {_in_comment(file.path.name)}. -->\n\n"
    text += markdown_table(header, rows, left=(0, 5))
    for result in results:
        lines = "".join(f"{_in_comment(line)}\n" for line in _provenance(result))
        text += f"\n<!--\n{lines}-->\n"
    return text


def claims_to_latex(file: ClaimsFile, results: Sequence[ClaimResult]) -> str:
    """Return LaTeX: a command for each number, and ``claimstable``, a booktabs table."""
    lines = [
        f"% Generated by make claims from {file.path.name}; edit that file.",
        "% In the preamble: \\usepackage[utf8]{inputenc}, \\usepackage{booktabs}, \\input{claims};",
        "% in the text: \\claimName{} for a number, \\claimstable for the table (with two columns, in",
        "% the environment table*).",
    ]
    rows = []
    for result in results:
        claim, figures = result.claim, _figures(result)
        lines += ["%", *(f"% {line}" for line in _provenance(result))]
        shown = {name: _latex_figure(figures[name]) for name in figures}
        for suffix in claim.macros:
            lines.append(rf"\newcommand{{\{claim.macro}{suffix}}}{{{shown[suffix]}}}")
        unit = claim.value.unit if claim.value else ""
        value = shown[""] + (rf"\,{latex_text(unit)}" if unit else "")
        interval = f"[{shown['Low']}, {shown['High']}]" if shown["Low"] else "--"
        cells = [value or "--", interval, *(shown[key] or "--" for key in ("N", "P", "Verdict"))]
        # In a narrow column, justified text has wide gaps.
        rows.append(" & ".join([rf"\raggedright {latex_text(claim.text)}", *cells]) + r" \\")
    lines += [
        "%",
        r"\newcommand{\claimstable}{{\small\setlength{\tabcolsep}{4pt}%",
        r"\begin{tabular}{p{0.25\linewidth}rrrrl}",
        r"\toprule",
        r"Claim & Value & 95\,\% interval & n & p & Verdict \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}}}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _figures(result: ClaimResult) -> dict[str, str]:
    """Return the texts of the claim's numbers by suffix of their LaTeX commands; "" for none."""
    claim, verdict = result.claim, result.verdict
    figures = dict.fromkeys(("", "Low", "High", "N", "P", "Verdict"), "")
    if claim.value:
        figures[""] = claim.value.number
    if verdict is not None:
        figures["Verdict"], figures["N"] = claim.verdict, str(verdict.n)
        if verdict.test is not None:
            digits = claim.value or _SHOWN
            low, high = (digits.of(bound).number for bound in verdict.test.interval)
            figures |= {"Low": low, "High": high, "P": format_p(verdict.p_of_word)}
    return figures


def _latex_figure(text: str) -> str:
    """Return a figure in math mode, a word as text."""
    if not text or text.isalpha():
        return text
    mathematical = text.replace("−", "-").replace(",", "{,}")
    power = re.fullmatch(r"(<?[-+0-9.{,}]+)e([-+]?)0*([0-9]+)([kMG]?)", mathematical)
    if power:
        sign = power[2].replace("+", "")
        mathematical = rf"{power[1]}\times 10^{{{sign}{power[3]}}}{power[4]}"
    mathematical = re.sub(r"([kMG])$", r"\\mathrm{\1}", mathematical)
    return rf"\ensuremath{{{mathematical}}}"


def _provenance(result: ClaimResult) -> Iterator[str]:
    """Yield lines without line breaks: subject, runs, commits, configurations, seeds, digest."""
    claim = result.claim
    yield from _wrapped(f"{claim.name}: {claim.subject}")
    runs = result.runs
    yield from _wrapped(f"runs: {', '.join(run.name for run in runs)}")
    yield from _wrapped(f"commit: {', '.join(dict.fromkeys(map(_commit, runs)))}")
    yield from _wrapped(f"configuration: {', '.join(dict.fromkeys(run.hash8 for run in runs))}")
    yield from _wrapped(f"seeds: {', '.join(map(str, sorted({run.seed for run in runs})))}")
    yield f"digest of the records: {result.digest}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COMMENT_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _commit(run: ClaimedRun) -> str:
    return (run.commit[:_COMMIT_DIGITS] or "unknown") + " edited" * run.edited


def _in_comment(text: str) -> str:
    """Return ``text`` without the end of an HTML comment."""
    return text.replace("--", "- -")
