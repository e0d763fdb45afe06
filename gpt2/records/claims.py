"""``make claims``: the claims of a document, checked against the runs of ``.config``."""

import json
from collections.abc import Sequence
from pathlib import Path

from gpt2.planning.plan import Plan
from lib.claims.check import ClaimResult, check_claims, claims_exit_code
from lib.claims.file import ClaimsFile, read_claims, updated_text
from lib.claims.render import (
    claim_lines,
    claims_to_json,
    claims_to_latex,
    claims_to_markdown,
    require_latex,
)
from lib.console import log
from lib.files import write_atomic
from lib.report.table import ResultTable

DEFAULT_FILE = "claims.toml"
OUTPUT_FILES = ("claims.tex", "claims.md")


def check(
    file: ClaimsFile, plan: Plan, table: ResultTable, *, out: str = "", as_json: bool = False
) -> tuple[int, str]:
    """Check the claims, and write LaTeX and Markdown if all hold. Return exit code and text.

    ``out`` is the folder of both files, the study's folder by default. Raises ConfigError if the
    file is invalid.
    """
    require_latex(file)
    results = check_claims(file, table, plan.runs)
    written = []
    if all(result.holds for result in results):
        written = _write(file, results, Path(out) if out else plan.folder)
    else:
        log("SKIP", f"{' and '.join(OUTPUT_FILES)}: not every claim holds")
    if as_json:
        return claims_exit_code(results), claims_to_json(file, results, written)
    return claims_exit_code(results), claim_lines(results)


def _write(file: ClaimsFile, results: Sequence[ClaimResult], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = (claims_to_latex(file, results), claims_to_markdown(file, results))
    for name, text in zip(OUTPUT_FILES, texts, strict=True):
        write_atomic(folder / name, text)
        log("CLAIMS", str(folder / name))
    return [str(folder / name) for name in OUTPUT_FILES]


def update(file: ClaimsFile, plan: Plan, table: ResultTable) -> ClaimsFile:
    """Write the recorded values and digests into the claims file, and return its new content.

    Required verdicts do not change, nor entries whose records are damaged or missing. Raises
    ConfigError if an entry cannot be replaced.
    """
    changes: dict[str, dict[str, str]] = {}
    for result in check_claims(file, table, plan.runs):
        claim, new = result.claim, {}
        if result.damaged or not result.digest:
            continue
        if claim.value and result.value is not None and not claim.value.holds(result.value):
            new["value"] = claim.value.of(result.value).text
        if claim.digest != result.digest:
            new["digest"] = result.digest
        if new:
            changes[claim.name] = new
            text = ", ".join(f"{key} = {json.dumps(value)}" for key, value in new.items())
            log("UPDATE", f"{claim.name}: {text}")
    if not changes:
        return file
    write_atomic(file.path, updated_text(file, changes))
    return read_claims(file.path)
