"""Check of claims against the records of runs.

A claim rests on runs: those of its cell, or every run of its contrast's steps. The digests of all
their files are verified before a number is taken from them.
"""

import difflib
import hashlib
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib.claims.file import Claim, ClaimedCell, ClaimsFile
from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_COMPARABLE, ConfigError, Problem
from lib.files import canonical_json
from lib.json_files import DamagedRecord, RecordError
from lib.plan.run import PlannedRun
from lib.report.table import ResultTable
from lib.report.verdicts import ContrastVerdict, VerdictWord
from lib.runs.audit import artifact_findings
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, State

_DIGEST_DIGITS = 16
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class ClaimedRun:
    """A finished run that supports a claim, and where it came from."""

    name: str
    seed: int
    hash8: str
    # "" if unknown.
    commit: str
    edited: bool
    manifest_digest: str


@dataclass(frozen=True)
class ClaimResult:
    """One checked claim."""

    claim: Claim
    # Why the claim does not hold; empty if it holds.
    problems: tuple[str, ...]
    # Whether its records are damaged, or not comparable.
    damaged: bool
    # Recorded number in the recorded unit; None if there is none.
    value: float | None
    verdict: ContrastVerdict | None
    runs: Sequence[ClaimedRun]
    # First digits of the digest of the verdict, or of the runs' manifests; "" without records.
    digest: str

    @property
    def holds(self) -> bool:
        """Return whether the claim holds."""
        return not self.problems


@dataclass(frozen=True)
class _Evidence:
    value: float | None = None
    verdict: ContrastVerdict | None = None
    runs: Sequence[ClaimedRun] = ()
    problems: Sequence[str] = ()
    damaged: bool = False
    # Content that the digest identifies; None without records.
    content: Any = None


def check_claims(
    file: ClaimsFile, table: ResultTable, runs: Sequence[PlannedRun[Any]]
) -> list[ClaimResult]:
    """Check every claim of ``file`` against the planned ``runs`` and the ``table`` of their results.

    Raises ConfigError for each claim on a study, contrast, run or seed that is not planned, and for
    each document that cannot be read.
    """
    if file.study and file.study != table.study:
        what = f"study: the claims are on {file.study} (.config plans {table.study})"
        advice = f"load the configuration of {file.study}, or type: make claims O=DIR"
        raise ConfigError(Problem(what, str(file.path), advice, code="claims.other-study"))
    checker = _Checker(file, table, runs)
    results, problems = [], []
    for claim in file.claims:
        try:
            results.append(checker.result(claim))
        except ConfigError as error:
            problems += [replace(problem, where=claim.where) for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    return results


def claims_exit_code(results: Sequence[ClaimResult]) -> int:
    """Return 4 if records are damaged or not comparable, 1 if a claim does not hold, else 0."""
    if any(result.damaged for result in results):
        return EXIT_NOT_COMPARABLE
    return EXIT_DONE if all(result.holds for result in results) else EXIT_FAILED


class _Checker:
    """The planned runs by name, with the findings on their files."""

    def __init__(
        self, file: ClaimsFile, table: ResultTable, runs: Sequence[PlannedRun[Any]]
    ) -> None:
        self._folder = file.path.parent
        self._verdicts = {v.contrast.name: v for v in table.verdicts.verdicts}
        self._by_slug: dict[str, list[PlannedRun[Any]]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            self._by_slug.setdefault(run.variant.slug, []).append(run)
        self._findings: dict[Path, list[str]] = {}

    def result(self, claim: Claim) -> ClaimResult:
        """Return the checked claim. Raises ConfigError if its subject is not planned."""
        evidence = self._cell(claim.cell) if claim.cell else self._contrast(claim.contrast)
        digest = "" if evidence.content is None else _digest(evidence.content)
        problems = [*evidence.problems]
        if not evidence.damaged:
            problems += _word_problem(claim, evidence.verdict)
            problems += _value_problem(claim, evidence.value)
            if claim.digest and digest and claim.digest != digest:
                problems.append(f"digest of the records: quoted {claim.digest}, found {digest}")
        problems += self._document_problems(claim)
        return ClaimResult(
            claim,
            tuple(problems),
            evidence.damaged,
            evidence.value,
            evidence.verdict,
            evidence.runs,
            digest,
        )

    def _contrast(self, name: str) -> _Evidence:
        verdict = self._verdicts.get(name)
        if verdict is None:
            raise _unknown("contrast", name, [*self._verdicts], "make verdicts")
        runs = [run for arm in verdict.contrast.weights for run in self._by_slug.get(arm, ())]
        evidence = self._of_runs(runs)
        if evidence.damaged:
            return replace(evidence, verdict=verdict)
        unfair = verdict.word is VerdictWord.UNFAIR
        return replace(
            evidence,
            value=verdict.difference,
            verdict=verdict,
            problems=[f"not comparable: {verdict.reason}"] if unfair else [],
            damaged=unfair,
            content=verdict.to_json(),
        )

    def _cell(self, cell: ClaimedCell) -> _Evidence:
        runs = self._by_slug.get(cell.run)
        if runs is None:
            raise _unknown("run", cell.run, [*self._by_slug], "make plan")
        if cell.seed is not None:
            seeds = [str(run.seed) for run in runs]
            runs = [run for run in runs if run.seed == cell.seed]
            if not runs:
                raise _unknown("seed", str(cell.seed), seeds, "make claims SEEDS=")
        evidence = self._of_runs(runs)
        if evidence.damaged:
            return evidence
        if len(evidence.runs) < len(runs):
            names = {run.name for run in evidence.runs}
            missing = [run.path.name for run in runs if run.path.name not in names]
            return replace(evidence, problems=[f"not finished: {_listed(missing)}"])
        try:
            values = [_figure(RunRecord(RunDir(run.path)), cell) for run in runs]
        except RecordError as error:
            return replace(evidence, problems=[error.problems[0].located], damaged=True)
        value = statistics.fmean(values)
        if cell.field == "perplexity":
            # As in the table: the geometric mean over seeds. A float ends at exp(709).
            value = math.exp(min(value, 700.0))
        content = [value, *(run.manifest_digest for run in evidence.runs)]
        return replace(evidence, value=value, content=content)

    def _of_runs(self, runs: Sequence[PlannedRun[Any]]) -> _Evidence:
        """Return the finished runs among ``runs``, with the findings on their files."""
        finished, problems = [], []
        for run in runs:
            record = RunRecord(RunDir(run.path))
            status = record.status
            if status is None or status.state not in (State.SUCCESS, State.DAMAGED):
                continue
            if run.path not in self._findings:
                findings = artifact_findings(record, every_byte=True)
                self._findings[run.path] = [f"{run.path}: {finding}" for finding in findings]
            problems += [f"damaged run {finding}" for finding in self._findings[run.path]]
            if not self._findings[run.path]:
                try:
                    finished.append(_claimed_run(run))
                except RecordError as error:
                    problems.append(f"damaged run {error.problems[0].located}")
        return _Evidence(runs=finished, problems=problems, damaged=bool(problems))

    def _document_problems(self, claim: Claim) -> list[str]:
        """Return the documents that do not quote the number of the claim."""
        if claim.value is None:
            return []
        quoted = re.compile(rf"(?<![\w.,+−-]){re.escape(claim.value.number)}(?![\w]|[.,]\w)")
        problems = []
        for name in claim.documents:
            try:
                text = (self._folder / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                what = f"documents: {name} cannot be read ({error})"
                raise ConfigError(Problem(what, code="claims.unreadable-document")) from None
            if not quoted.search(text):
                problems.append(f"{name} does not quote {claim.value.number}")
        return problems


def _claimed_run(run: PlannedRun[Any]) -> ClaimedRun:
    """Return the provenance of a finished run. Raises RecordError if it is another run's."""
    record = RunRecord(RunDir(run.path))
    manifest, recorded = record.manifest, canonical_json(record.identity)
    if recorded != canonical_json(run.config.identity()):
        file = record.config.file
        raise DamagedRecord(file, f"the identity of {run.label}", "another identity")
    return ClaimedRun(
        run.path.name,
        run.seed,
        run.config.hash8,
        record.code.git_sha or "",
        record.code.dirty_tree is not False,
        manifest.value(str, "manifest_digest"),
    )


def _figure(record: RunRecord, cell: ClaimedCell) -> float:
    """Return the recorded figure of a cell; of a perplexity, its logarithm. Raises RecordError."""
    final, timing = record.final, record.timing
    if cell.iterations is not None:
        first, last = cell.iterations
        losses = [row.loss for row in record.train_rows if first <= row.iteration <= last]
        if len(losses) < last - first + 1:
            what = f"iterations {first} to {last} (the run has {final.iterations})"
            raise ConfigError(Problem(f"cell: no {what}", code="claims.unknown-iteration"))
        return statistics.fmean(losses)
    figures: Mapping[str, float] = {
        "val_loss": final.val_loss,
        "unigram_entropy": final.unigram_entropy,
        "perplexity": final.val_loss,
        "parameters": final.parameters,
        "tokens": final.tokens,
        "iterations": final.iterations,
        "sparsity": final.sparsity,
        "train_seconds": timing.train_seconds,
        "mean_step_seconds": timing.mean_step_seconds,
        "tokens_per_second": timing.tokens_per_second,
    }
    return figures[cell.field]


def _word_problem(claim: Claim, verdict: ContrastVerdict | None) -> list[str]:
    if verdict is None or (verdict.is_given and verdict.word.value == claim.verdict):
        return []
    word = verdict.word.value if verdict.is_given else "none"
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return [f"verdict: required {claim.verdict}, found {word}{reason}"]


def _value_problem(claim: Claim, value: float | None) -> list[str]:
    if claim.value is None or (value is None and claim.cell):
        return []
    if value is None:
        return [f"value: quoted {claim.value.text}, found none"]
    if claim.value.holds(value):
        return []
    return [f"value: quoted {claim.value.text}, found {claim.value.of(value).text} ({value!r})"]


def _digest(content: Any) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:_DIGEST_DIGITS]


def _unknown(kind: str, name: str, names: Sequence[str], command: str) -> ConfigError:
    close = difflib.get_close_matches(name, names, _MAX_NAMES_SHOWN, 0.3)
    expected = f" (expected one of {_listed(close or names)})" if names else ""
    what = f"{kind}: {name!r} is not planned{expected}"
    return ConfigError(Problem(what, next=f"type: {command}", code=f"claims.unknown-{kind}"))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown + (", …" if len(names) > _MAX_NAMES_SHOWN else "")
