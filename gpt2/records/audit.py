"""``make audit``: consistency checks of run directories against their own records and the data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from gpt2.config import Config
from gpt2.data import dataset, tokenizer
from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.data.sampler import order_digest_from_manifest
from gpt2.records.files import own_values, recorded_config
from gpt2.training.per_query import item_facts
from lib.errors import DataError, KablateError, Problem, visible
from lib.files import json_digest
from lib.json_files import MissingRecord, RecordError
from lib.report.render import json_document
from lib.runs.audit import (
    artifact_findings,
    consistency_findings,
    mismatch,
    unreadable_contents,
    weight_findings,
)
from lib.runs.code import changed_since
from lib.runs.record import Finding, RunRecord
from lib.runs.run_dir import RunDir
from lib.units import first_of

SCHEMA_VERSION = 1


class Audit(NamedTuple):
    """Findings of a run, none if it is VALID, and notes on skipped checks."""

    run: str
    findings: list[Finding]
    notes: list[str]

    @property
    def valid(self) -> bool:
        return not self.findings


def audit(run: RunDir, build_dir: Path) -> Audit:
    """Audit a run from its directory, and against its data set if the data set is available."""
    record = RunRecord(run)
    verdict = Audit(str(run.path), [*artifact_findings(record)], [])
    if problems := [Finding.of(error) for error in unreadable_contents(record)]:
        verdict.findings.extend(each for each in problems if each not in verdict.findings)
        verdict.notes.append("recomputation: not every file can be read")
        return verdict
    # Files without a digest: a full disk leaves their lines incomplete.
    for error in unreadable_contents(record, ("telemetry", "heartbeats")):
        if not isinstance(error, MissingRecord):
            verdict.notes.append(str(error.problems[0].located))
    try:
        verdict.findings.extend(consistency_findings(record))
        _configuration(record, build_dir, verdict)
        if run.weights.is_file():
            verdict.findings.extend(weight_findings(record))
    except RecordError as error:
        verdict.findings.append(Finding.of(error))
    # Fields have been read; contents of lists and tables have not.
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        verdict.findings.append(Finding(run.summary.name, "computable figures", what))
    return verdict


def to_text(verdicts: Sequence[Audit]) -> str:
    lines = []
    for verdict in verdicts:
        lines.append(f"{'VALID' if verdict.valid else 'INVALID':<7} {verdict.run}")
        lines += [f"        {finding}" for finding in verdict.findings]
        lines += [f"        skipped: {note}" for note in verdict.notes]
    return "".join(f"{visible(line)}\n" for line in lines)


def to_json(verdicts: Sequence[Audit]) -> str:
    runs = [
        {"valid": each.valid, **each._asdict(), "findings": [asdict(f) for f in each.findings]}
        for each in verdicts
    ]
    return json_document(SCHEMA_VERSION, {"runs": runs})


def _configuration(record: RunRecord, build_dir: Path, verdict: Audit) -> None:
    """Recompute the hashes from the identity, the identity from the symbols, and the documents."""
    run, manifest, name = record.run, record.manifest, record.run.resolved_config.name
    digest = json_digest(record.identity)
    verdict.findings.extend(mismatch(name, "hash8", digest[:8], record.hash8))
    recorded = manifest.value(str, "config", "config_digest")
    verdict.findings.extend(mismatch(run.manifest.name, "config.config_digest", digest, recorded))
    if changed := changed_since(record.sources):
        note = f"identity and documents: made by other code ({first_of(changed)})"
        verdict.notes.append(note)
        return
    own = own_values(build_dir)
    try:
        config = recorded_config(record, own)
    except (KablateError, KeyError) as error:
        verdict.findings.append(Finding(name, "symbols of a configuration", str(error)))
        return
    verdict.findings.extend(mismatch(name, "identity of the symbols", config.digest, digest))
    order = order_digest_from_manifest(manifest.fields, record.final.iterations)
    recorded = record.summary.find("final", "data_order_digest")
    verdict.findings.extend(mismatch(run.summary.name, "final.data_order_digest", order, recorded))
    try:
        verdict.findings.extend(_documents(record, config, build_dir))
    except DataError as error:
        verdict.notes.append(f"evaluation documents: {error.problems[0].what}")


def _documents(record: RunRecord, config: Config, build_dir: Path) -> Iterator[Finding]:
    """Compare the per-document rows with the documents of the evaluation. Raises DataError."""
    split = _held_out(record.manifest.value(str, "data", "digest"), config, build_dir)
    data_dir = dataset.data_folder(config.data, build_dir)
    vocabulary = tokenizer.load_tokenizer(config.data.tokenizer, data_dir)
    budget = config.data.eval_tokens, config.data.eval_documents
    windows = evaluation_windows(split, config.model.shape.block_size, *budget)
    facts = item_facts(windows, split, config.train.batch_size, config.data.dataset, vocabulary)
    name, rows = record.run.per_query.name, record.documents
    yield from mismatch(name, "documents of the evaluation", len(facts), len(rows))
    for number, (fact, row) in enumerate(zip(facts.values(), rows, strict=False), 1):
        for field_name, value in vars(fact).items():
            found = vars(row)[field_name]
            yield from mismatch(name, f"{field_name} of row {number}", value, found)


def _held_out(digest: str, config: Config, build_dir: Path) -> TokenSplit:
    """Return the validation split of the data set ``digest``, verified. Raises DataError."""
    data_dir = dataset.data_folder(config.data, build_dir)
    for path in sorted(data_dir.glob(f"*/{dataset.MANIFEST}")):
        manifest = dataset.read_manifest(path.parent)
        if manifest["digest"] == digest:
            return dataset.open_split(path.parent, manifest, "val")
    what = f"data set {digest[:12]} not found below {data_dir}"
    raise DataError(Problem(what, code="data.missing"))
