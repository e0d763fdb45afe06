"""``make audit``: a run directory against its own records, and against the data set if it is there."""

import csv
import itertools
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpt2.config import Config
from gpt2.data import dataset, tokenizer
from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.data.sampler import order_digest_from_manifest
from gpt2.records.files import find_started, own_values, recorded_config
from gpt2.study.arguments import asked_lookup
from gpt2.training.per_query import item_facts
from lib.errors import EXIT_DONE, EXIT_INVALID, DataError, KablateError, Problem, visible
from lib.files import json_digest
from lib.json_files import MissingRecord, RecordError
from lib.make_variables import require_value
from lib.report.render import json_document
from lib.runs.code import changed_since
from lib.runs.digests import Check, digest_findings, mismatches
from lib.runs.documents import evaluation_metrics, expected_calibration_error, train_loss
from lib.runs.record import Finding, RunRecord
from lib.runs.run_dir import RunDir, State
from lib.units import first_of

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 1
# What the records of a finished run contain, by the name of the property of ``RunRecord``.
_CONTENTS = (
    *("code", "sources", "hardware", "attempts", "final", "timing"),
    *("hash8", "identity", "settings", "symbols", "metrics", "documents"),
)
# Files without a digest, which a run may lack: a full disk leaves their lines incomplete.
_SAMPLED = ("telemetry", "heartbeats")


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
    record, notes = RunRecord(run), list[str]()
    findings = [*_file_findings(record)]
    verdict = Audit(str(run.path), findings, notes)
    if unreadable := [Finding.of(error) for error in _unreadable(record, _CONTENTS)]:
        findings.extend(each for each in unreadable if each not in findings)
        notes.append("recomputation: not every file can be read")
        return verdict
    notes += [
        str(error.problems[0].located)
        for error in _unreadable(record, _SAMPLED)
        if not isinstance(error, MissingRecord)
    ]
    try:
        for checks in (_figures(record), _training_rows(record), _copies(record)):
            findings.extend(mismatches(checks))
        findings.extend(mismatches(_configuration(record, build_dir, notes)))
        if run.weights.is_file():
            findings.extend(_weight_findings(record))
    except RecordError as error:
        findings.append(Finding.of(error))
    # Fields have been read; contents of lists and tables have not.
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        findings.append(Finding(run.summary.name, "computable figures", what))
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


def _file_findings(record: RunRecord) -> Iterator[Finding]:
    status, name = record.status, record.run.status.name
    if status is None:
        yield Finding(name, "state SUCCESS", "none")
    elif status.state is not State.SUCCESS:
        state = status.message if status.state is State.DAMAGED else str(status.state)
        yield Finding(name, "state SUCCESS", state)
    yield from record.file_findings()
    if record.sizes.get(record.run.manifest.name):
        yield from digest_findings(record)


def _unreadable(record: RunRecord, names: Sequence[str]) -> Iterator[RecordError]:
    """Yield the error of every content of the records that cannot be read."""
    for name in names:
        try:
            getattr(record, name)
        except RecordError as error:
            yield error


# The records against each other. Floats must be equal to the last bit.


def _figures(record: RunRecord) -> Iterator[Check]:
    """Recompute the summary from the rows, and the derived columns of the rows from the others."""
    run, summary, final, timing = record.run, record.summary, record.final, record.timing
    summary.value(float, "final", "budget_stretch")
    names = ("n_tokens", "n_correct", "confidence_sum")
    bins = {name: summary.value(list, "calibration", name) for name in names}
    figures = evaluation_metrics(record.documents)
    figures["expected_calibration_error"] = expected_calibration_error(bins)
    if not _gap(record):
        figures["train_loss"] = train_loss(record.metrics_fields, final.iterations)
    counted = final.iterations - timing.warmup_iterations
    step_seconds = (timing.train_seconds - timing.warmup_seconds) / max(counted, 1)
    speeds = {
        "mean_step_seconds": step_seconds,
        "tokens_per_second": final.tokens / final.iterations / (step_seconds or math.nan),
    }
    for section, expected in (("final", figures), ("timing", speeds)):
        for field, value in expected.items():
            yield run.summary.name, f"{section}.{field}", value, summary.find(section, field)
    name, steps = run.per_query.name, {item.eval_step for item in record.documents}
    yield name, "eval_step", [final.iterations], [*steps]
    with open(run.per_query, encoding="utf-8", newline="") as stream:
        rows = zip(record.documents, csv.DictReader(stream), strict=True)
        for number, (row, cells) in enumerate(rows, 1):
            bits = "" if row.bits_per_byte is None else repr(row.bits_per_byte)
            yield name, f"nll_mean of row {number}", repr(row.nll_mean), cells["nll_mean"]
            yield name, f"bits_per_byte of row {number}", bits, cells["bits_per_byte"]


def _training_rows(record: RunRecord) -> Iterator[Check]:
    """Check that each iteration has one row and that the last evaluation equals the summary."""
    name, final, status = record.run.metrics.name, record.final, record.status
    # Of an iteration.
    order = ("train", "statistics", "eval")
    keys = [(row["iteration"], order.index(row["kind"])) for row in record.metrics_fields]
    expected = "by iteration, none twice"
    yield name, "order of rows", expected, expected if keys == sorted(set(keys)) else "another"
    missing, rows = _gap(record), f"one for each of {final.iterations} iterations"
    yield name, "rows", rows, missing or rows
    if not missing:
        yield name, "tokens", final.tokens, max(row["tokens"] for row in record.metrics_fields)
    last = record.metrics_fields[-1]
    yield name, "kind of the last row", "eval", last["kind"]
    if last["kind"] != "eval":
        return
    yield name, "last iteration", final.iterations, last["iteration"]
    for field in ("val_loss", "token_accuracy", "sparsity"):
        yield name, f"last {field}", record.summary.find("final", field), last[field]
    if status and status.state is State.SUCCESS:
        file = record.run.status.name
        yield file, "iteration", final.iterations, status.iteration
        # 0 if a time budget limits the run.
        yield file, "iterations", status.iterations and final.iterations, status.iterations


def _gap(record: RunRecord) -> str:
    """Return a description of the first missing or extra training row; "" if there is none."""
    iterations = (row.iteration for row in record.train_rows)
    planned = range(1, record.final.iterations + 1)
    for expected, recorded in itertools.zip_longest(planned, iterations):
        if expected != recorded:
            return f"iteration {recorded} in place of {expected}"
    return ""


def _copies(record: RunRecord) -> Iterator[Check]:
    """Compare the values that several files contain."""
    manifest, symbols = record.manifest, record.symbols
    seed, profile = symbols.get("SEED"), symbols.get("RUN_PROFILE")
    for content, place, expected in (
        (manifest, ("seeds", "seed"), seed),
        (manifest, ("run", "run_profile"), profile),
        (manifest, ("run", "hash8"), record.hash8),
        (manifest, ("config", "overrides"), record.settings),
        (record.summary, ("seed",), seed),
        (record.summary, ("run_profile",), profile),
    ):
        yield content.file.name, ".".join(place), expected, content.find(*place)
    ranks = len(set(manifest.value(list, "init_weights_digest")))
    yield manifest.file.name, "initial weights of all ranks, distinct", 1, ranks


# The records against the code and the data set.


def _configuration(record: RunRecord, build_dir: Path, notes: list[str]) -> Iterator[Check]:
    """Recompute the hashes from the identity, the identity from the symbols, and the documents."""
    run, manifest, name = record.run, record.manifest, record.run.resolved_config.name
    digest = json_digest(record.identity)
    recorded = manifest.value(str, "config", "config_digest")
    yield name, "hash8", digest[:8], record.hash8
    yield run.manifest.name, "config.config_digest", digest, recorded
    if changed := changed_since(record.sources):
        notes.append(f"identity and documents: made by other code ({first_of(changed)})")
        return
    try:
        config = recorded_config(record, own_values(build_dir))
    except (KablateError, KeyError) as error:
        yield name, "symbols", "of a configuration", str(error)
        return
    yield name, "identity of the symbols", config.digest, digest
    order = order_digest_from_manifest(manifest.fields, record.final.iterations)
    recorded = record.summary.find("final", "data_order_digest")
    yield run.summary.name, "final.data_order_digest", order, recorded
    try:
        yield from _documents(record, config, build_dir)
    except DataError as error:
        notes.append(f"evaluation documents: {error.problems[0].what}")


def _documents(record: RunRecord, config: Config, build_dir: Path) -> Iterator[Check]:
    """Compare the per-document rows with the documents of the evaluation. Raises DataError."""
    data_dir = config.data.folder(build_dir)
    split = _held_out(record.manifest.value(str, "data", "digest"), data_dir)
    vocabulary = tokenizer.load_tokenizer(config.data.tokenizer, data_dir)
    budget = config.data.eval_tokens, config.data.eval_documents
    windows = evaluation_windows(split, config.model.shape.block_size, *budget)
    facts = item_facts(windows, split, config.train.batch_size, config.data.dataset, vocabulary)
    name, rows = record.run.per_query.name, record.documents
    yield name, "documents of the evaluation", len(facts), len(rows)
    for number, (fact, row) in enumerate(zip(facts.values(), rows, strict=False), 1):
        for field, value in vars(fact).items():
            yield name, f"{field} of row {number}", value, vars(row)[field]


def _held_out(digest: str, data_dir: Path) -> TokenSplit:
    """Return the validation split of the data set ``digest``, verified. Raises DataError."""
    for path in sorted(data_dir.glob(f"*/{dataset.MANIFEST}")):
        if dataset.read_manifest(path.parent)["digest"] == digest:
            return dataset.open_folder(path.parent).val
    what = f"data set {digest[:12]} not found below {data_dir}"
    raise DataError(Problem(what, code="data.missing"))


def _weight_findings(record: RunRecord) -> Iterator[Finding]:
    """Recompute digest, parameter count, finiteness and sparsity of the final weights."""
    # Damaged files are reported without the delay of this import.
    import safetensors.torch
    import torch

    from lib.runs.checkpoint import weights_digest

    file, final = record.run.weights.name, record.final
    try:
        weights = safetensors.torch.load_file(record.run.weights)
    except (OSError, safetensors.SafetensorError) as error:
        yield Finding(file, "weights", str(error))
        return
    # The summary lists every prunable matrix, so no model has to be built.
    layers = final.sparsity_by_layer
    zeros = {name: int((weights[name] == 0).sum()) for name in layers if name in weights}
    sizes = {name: weight.numel() for name, weight in weights.items()}
    total = sum(zeros.values()) / max(1, sum(sizes[name] for name in zeros))
    digest = record.manifest.value(str, "final_weights_digest")
    broken = {name: int((~torch.isfinite(weight)).sum()) for name, weight in weights.items()}
    yield from mismatches(
        [
            (file, "final_weights_digest", digest, weights_digest(weights)),
            (file, "parameters", final.parameters, _parameters(weights, final.parameters)),
            *((file, f"non-finite elements in {name}", 0, count) for name, count in broken.items()),
            (file, "prunable matrices", sorted(layers), sorted(zeros)),
            *((file, f"sparsity of {n}", layers[n], zeros[n] / sizes[n]) for n in zeros),
            (file, "sparsity", final.sparsity, total),
        ]
    )


def _parameters(weights: Mapping[str, "Tensor"], recorded: int) -> int:
    """Return the number of elements of ``weights``, or ``recorded`` if their codes allow it.

    Two codes of 4 bits are one unsigned byte, and up to 63 of a matrix fill its last block.
    """
    codes = [weight for name, weight in weights.items() if name.endswith(".codes.packed")]
    packed = [weight.numel() for weight in codes if not weight.is_signed()]
    scales = sum(w.numel() for name, w in weights.items() if name.endswith(".codes.scales"))
    found = sum(weight.numel() for weight in weights.values()) - scales + sum(packed)
    return recorded if 0 <= found - recorded <= 63 * len(packed) else found


def audit_runs(options: Namespace) -> tuple[int, str]:
    """Audit runs from their files: VALID, or INVALID with one line per finding.

    kablate audit --runs "ratio/*"                          runs of the plan of .config
    kablate audit --runs results/single/run-s1-1a2b3c4d     a run directory

    Checks that every file exists, is well-formed, matches its digest, and agrees with the values
    recomputed from the other files. Evaluation documents are compared with the data set if it is
    available. Exit codes: 0 all runs are valid, 6 a run is invalid, 2 no such run.
    """
    named = require_value(options.runs, "RUNS", "make audit RUNS=NAME")
    runs = find_started(named, options.build_dir, asked_lookup(options))
    results = [audit(run, options.build_dir) for run in runs]
    code = EXIT_DONE if all(result.valid for result in results) else EXIT_INVALID
    return code, to_json(results) if options.json else to_text(results)
