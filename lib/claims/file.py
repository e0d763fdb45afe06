"""Claims files: TOML with one ``[[claim]]`` for each statement of a document about runs.

    study = "ratio"
    seeds = "1-5"

    [[claim]]
    name = "ra"
    text = "RA lowers the loss"
    contrast = "ra vs baseline"
    verdict = "BETTER"
    value = "-0.0062"
    documents = ["README.md"]

    [[claim]]
    name = "gate-loss"
    text = "validation loss of golden-gate"
    cell = { run = "golden-gate", seed = 1, field = "val_loss" }
    value = "2.5063"
    digest = "0123456789abcdef"

A value is text, so that its digits are those of the document.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.claims.quote import QuotedNumber
from lib.errors import ConfigError, Problem
from lib.report.verdicts import VerdictWord
from lib.toml_files import TomlEntries, entry_spans

# Words that a claim may require. UNFAIR supports no claim.
WORDS = tuple(word.value for word in VerdictWord if word is not VerdictWord.UNFAIR)
# Field of a cell → unit of the recorded number.
FIELDS: Mapping[str, str] = {
    "val_loss": "nats",
    "train_loss": "nats",
    "unigram_entropy": "nats",
    "perplexity": "",
    "parameters": "parameters",
    "tokens": "tokens",
    "iterations": "iterations",
    "sparsity": "fraction",
    "train_seconds": "s",
    "mean_step_seconds": "s",
    "tokens_per_second": "tok/s",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
_FILE_KEYS = {"study": str, "seeds": str, "claim": list}
_KEYS = {
    "name": str,
    "text": str,
    "contrast": str,
    "cell": dict,
    "verdict": str,
    "value": str,
    "digest": str,
    "documents": list,
}
_CELL_KEYS = {"run": str, "field": str, "seed": int, "iterations": list}
_EXAMPLE = "see docs/verdicts.md, Claims"


@dataclass(frozen=True)
class ClaimedCell:
    """A figure of one run, or its mean over the seeds of a run."""

    run: str
    # A key of FIELDS.
    field: str
    # None for the mean over the seeds of the plan.
    seed: int | None = None
    # First and last iteration of a mean training loss; None for the final figure.
    iterations: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Return the cell in output: ``golden-gate s1 val_loss``."""
        seed = "" if self.seed is None else f" s{self.seed}"
        span = "" if self.iterations is None else " {}-{}".format(*self.iterations)
        return f"{self.run}{seed} {self.field}{span}"


@dataclass(frozen=True)
class Claim:
    """One statement: a verdict on a contrast, a quoted number, or both."""

    name: str
    text: str
    # Exactly one of contrast ("step vs reference", or an effect) and cell.
    contrast: str
    cell: ClaimedCell | None
    # Required word; "" for a cell.
    verdict: str
    value: QuotedNumber | None
    # First 16 digits of the digest of the records; "" if any records may support the claim.
    digest: str
    # Files, relative to the claims file, that quote the number.
    documents: tuple[str, ...]
    # file:line of the entry.
    where: str

    @property
    def subject(self) -> str:
        """Return the contrast or the cell."""
        return self.cell.name if self.cell else self.contrast

    @property
    def macro(self) -> str:
        """Return the LaTeX command of the number: claimGateLoss of gate-loss, letters only."""
        words = re.split(r"[-_]", self.name)
        named = "".join(word[0].upper() + word[1:] for word in words)
        return "claim" + re.sub(r"[0-9]", lambda match: _DIGITS[int(match[0])], named)

    @property
    def macros(self) -> list[str]:
        """Return the suffixes of all LaTeX commands of the claim."""
        figures = ["Low", "High", "N", "P", "Verdict"] if self.contrast else []
        return ["", *figures] if self.value else figures


@dataclass(frozen=True)
class ClaimsFile:
    """The entries of a claims file."""

    path: Path
    text: str
    # Name of the study; "" for any.
    study: str
    # Seeds of the runs, as in SEEDS=; "" for those of .config.
    seeds: str
    claims: Sequence[Claim]


def read_claims(path: Path) -> ClaimsFile:
    """Return the claims of a file. Raises ConfigError with every problem and its line."""
    reader = _Reader(path, "claim", "claims", f"type: make claims CLAIMS=FILE; {_EXAMPLE}")
    content, claims = reader.content, reader.claims()
    if reader.problems:
        raise ConfigError(*reader.problems)
    return ClaimsFile(path, reader.text, content.get("study", ""), content.get("seeds", ""), claims)


def updated_text(file: ClaimsFile, changes: Mapping[str, Mapping[str, str]]) -> str:
    """Return the file with changed values and digests, and everything else unchanged.

    ``changes`` maps names of claims to new texts of ``value`` and ``digest``. Raises ConfigError if
    an entry is written so that its lines cannot be replaced.
    """
    lines = file.text.splitlines(keepends=True)
    spans = entry_spans(lines, "claim")
    expected = tomllib.loads(file.text)
    for index in range(len(file.claims) - 1, -1, -1):
        changed = changes.get(file.claims[index].name, {})
        expected["claim"][index].update(changed)
        start, end = spans[index] if index < len(spans) else (0, 0)
        for key, value in changed.items():
            pattern = re.compile(rf"([ \t]*{key}[ \t]*=[ \t]*)(?:\"[^\"\\]*\"|'[^']*')")
            places = [i for i in range(start, end) if pattern.match(lines[i])]
            if places:
                lines[places[0]] = pattern.sub(rf'\g<1>"{value}"', lines[places[0]], count=1)
            else:
                lines[start] = f'{lines[start].rstrip()}\n{key} = "{value}"\n'
    text = "".join(lines)
    try:
        is_exact = tomllib.loads(text) == expected
    except tomllib.TOMLDecodeError:
        is_exact = False
    if not is_exact:
        what = "cannot be updated (expected [[claim]] tables with one key per line)"
        raise ConfigError(Problem(what, str(file.path), _EXAMPLE, code="claims.not-updatable"))
    return text


class _Reader(TomlEntries):
    """The problems of one claims file, and the claims without problems."""

    def claims(self) -> list[Claim]:
        """Return the claims, and note every problem of the file."""
        self.keys(self.content, _FILE_KEYS, None)
        entries = self.entries()
        if entries is None:
            return []
        if not entries:
            self.note("no claim (expected at least one [[claim]])", "empty", None)
        claims = [c for i, entry in enumerate(entries) if (c := self._claim(i, entry))]
        self._collisions(claims)
        return claims

    def _claim(self, index: int, entry: Mapping[str, Any]) -> Claim | None:
        before = len(self.problems)
        self.keys(entry, _KEYS, index)
        for key in ("name", "text"):
            if key not in entry:
                self.note(f"{key}: missing", "missing-key", index)
        if len(self.problems) > before:
            return None
        name, is_contrast = entry["name"], "contrast" in entry
        if not _NAME.fullmatch(name):
            what = f"name: invalid {name!r} (expected letters and digits, joined by - or _)"
            self.note(what, "invalid-value", index, "name")
        if is_contrast == ("cell" in entry):
            self.note("expected either contrast or cell", "missing-key", index)
            return None
        self._word(entry, is_contrast, index)
        if not is_contrast and "value" not in entry:
            self.note("value: missing", "missing-key", index)
        if not _DIGEST.fullmatch(entry.get("digest", "0" * 16)):
            what = f"digest: invalid {entry['digest']!r} (expected 16 hexadecimal digits)"
            self.note(what, "invalid-value", index, "digest")
        documents = entry.get("documents", [])
        if not all(isinstance(document, str) for document in documents):
            self.note("documents: expected file names", "invalid-value", index, "documents")
        if documents and "value" not in entry:
            self.note("documents: require a value", "missing-key", index, "documents")
        cell = None if is_contrast else self._cell(entry["cell"], index)
        value = self._value(entry, cell, index)
        if len(self.problems) > before:
            return None
        return Claim(
            name,
            " ".join(entry["text"].split()),
            entry.get("contrast", ""),
            cell,
            entry.get("verdict", ""),
            value,
            entry.get("digest", ""),
            tuple(documents),
            self.where(index),
        )

    def _word(self, entry: Mapping[str, Any], is_contrast: bool, index: int) -> None:
        word = entry.get("verdict")
        if is_contrast and word not in WORDS:
            got = "none" if word is None else repr(word)
            what = f"verdict: invalid (expected one of {', '.join(WORDS)}, got {got})"
            self.note(what, "invalid-verdict", index, "verdict")
        if not is_contrast and word is not None:
            what = "verdict: a cell has none (expected a contrast)"
            self.note(what, "invalid-verdict", index, "verdict")

    def _value(
        self, entry: Mapping[str, Any], cell: ClaimedCell | None, index: int
    ) -> QuotedNumber | None:
        if "value" not in entry or ("cell" in entry and cell is None):
            return None
        try:
            return QuotedNumber.parse(entry["value"], FIELDS[cell.field] if cell else "nats")
        except ValueError as error:
            what = f"value: invalid {entry['value']!r} ({error})"
            self.note(what, "invalid-number", index, "value")
            return None

    def _cell(self, cell: Mapping[str, Any], index: int) -> ClaimedCell | None:
        before = len(self.problems)
        self.keys(cell, _CELL_KEYS, index, "cell")
        for key in ("run", "field"):
            if key not in cell:
                self.note(f"cell.{key}: missing", "missing-key", index, "cell")
        if len(self.problems) > before:
            return None
        name, span = cell["field"], cell.get("iterations")
        if name not in FIELDS:
            what = f"cell.field: unknown {name!r} (expected one of {', '.join(FIELDS)})"
            self.note(what, "unknown-field", index, "cell")
            return None
        if (name == "train_loss") != (span is not None):
            what = "cell.iterations: required by train_loss alone (expected [first, last])"
            self.note(what, "missing-key", index, "cell")
            return None
        if span is not None and not _is_span(span):
            what = f"cell.iterations: invalid {span!r} (expected [first, last], from 1)"
            self.note(what, "invalid-value", index, "cell")
            return None
        return ClaimedCell(
            cell["run"], name, cell.get("seed"), (span[0], span[1]) if span else None
        )

    def _collisions(self, claims: Sequence[Claim]) -> None:
        """Note claims with equal names, or with equal LaTeX commands."""
        names: dict[str, Claim] = {}
        commands: dict[str, Claim] = {}
        for claim in claims:
            first = names.setdefault(claim.name, claim)
            if first is not claim:
                what = f"duplicate name {claim.name!r} (also at {first.where})"
                self.problems.append(Problem(what, claim.where, code="claims.duplicate"))
                continue
            for suffix in claim.macros:
                other = commands.setdefault(f"{claim.macro}{suffix}", claim)
                if other is not claim:
                    what = (
                        f"{claim.name}: LaTeX command \\{claim.macro}{suffix} is that of "
                        f"{other.name} too"
                    )
                    advice = "rename one of them"
                    self.problems.append(
                        Problem(what, claim.where, advice, code="claims.duplicate-command")
                    )


def _is_span(span: Sequence[Any]) -> bool:
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in span)
    return len(span) == 2 and whole and 1 <= span[0] <= span[1]
