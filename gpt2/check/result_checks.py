"""Results that a run writes: rows, summary and text sample."""

import csv
import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gpt2 import train
from gpt2.check.finding import CheckFinding
from gpt2.check.pairing_checks import stream_key
from gpt2.check.short_run import in_batches_of
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import prunable_rows
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.evaluate import Evaluator
from gpt2.generate import SamplingOptions, generate
from gpt2.model import GPT
from gpt2.records.files import write_resolved_config
from gpt2.training.finish import generate_sample
from gpt2.training.records import RecordWriter
from gpt2.training.session import TrainingSession
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

END_OF_TEXT = 256
# Rows of a batch: the last batch of five windows has fewer. No other number of the small form.
BATCH_ROWS = 3
_BINS = 15
# Version of summary.json.
_SCHEMA = 2
# Log-probabilities in fp32 against float64.
_TOLERANCE = 1e-6
# A prompt of other bytes than characters, and the tokens of a sample.
_PROMPT, _SAMPLED = "Hä", 3
# Bytes of a frequent token: one character in UTF-8.
_WIDE = {ord("e"): "é".encode()}


@dataclass(frozen=True)
class ExpectedWindow:
    """Held-out window of a document: ``tokens`` from its token ``start`` on."""

    document: str
    start: int
    tokens: list[int]
    order: bytes


@dataclass
class ExpectedDocument:
    """Recomputed scores of a document."""

    # Predicted tokens by the offset of their window, and the first window's batch and row.
    parts: dict[int, list[int]] = field(default_factory=dict)
    place: tuple[int, int] = (0, 0)
    tokens: int = 0
    bytes: int = 0
    correct: int = 0
    nll: float = 0.0


class _Gpt2Bytes(ByteTokenizer):
    """Bytes of tokens as GPT-2's tokenizer has them: more than one, and an end of text by name.

    The name of the end of text has no byte of the text.
    """

    def token_bytes(self, token: int) -> bytes:
        """Return the byte, two bytes of one character, or the name of the end-of-text token."""
        return _WIDE.get(token) or super().token_bytes(token) or b"<|endoftext|>"


def finishing_session(subject: StepUnderTest) -> TrainingSession:
    """Return the traced session with a separate folder and a sample."""
    session = subject.traced_run.run.session
    settings: dict[str, Any] = {
        "sample_tokens": _SAMPLED,
        "sample_prompt": _PROMPT,
    }
    telemetry = replace(session.config.telemetry, statistics_rows=1)
    train_config = replace(session.config.train, **settings)
    files = RunDir(subject.context.new_run_dir())
    config = replace(session.config, train=train_config, telemetry=telemetry)
    return replace(
        session,
        run=files,
        records=RecordWriter(files, lambda event: None),
        config=config,
        tokenizer=_Gpt2Bytes(),
        evaluate=in_batches_of(len(session.evaluate.windows), session.evaluate),
    )


def configured_evaluator(session: TrainingSession) -> Evaluator:
    """Return a new evaluator of the session's data, configured with batches of ``BATCH_ROWS``."""
    train_config = session.config.train
    global_batch = BATCH_ROWS * train_config.grad_accumulation
    train_config = replace(train_config, global_batch=global_batch, batch_size=BATCH_ROWS)
    config = replace(session.config, train=train_config)
    return Evaluator(config, session.dataset.val, session.device)


def finish(session: TrainingSession, losses: Sequence[float]) -> RunRecord:
    """Evaluate the present weights and write the results as the trainer does at the end of a run."""
    # Steps of the traced run were not timed, and speeds are per second.
    with session.state.clock:
        for i, loss in enumerate(losses, 1):
            # Only the last step has no gradient.
            norm = 0.0 if i == len(losses) else 1.0
            row = {"iteration": i, "tokens": i, "lr": 0.0, "loss": loss, "grad_norm": norm}
            session.records.metrics(kind="train", **row)
        # An earlier and better evaluation, which is not the result.
        earlier = {"iteration": 1, "tokens": 1, "val_loss": 1.0, "token_accuracy": 1.0}
        session.records.metrics(kind="eval", **earlier, sparsity=0.0)
        evaluation = session.evaluate(session.state.model)
        assert evaluation is not None
        # The launcher writes it before training; results are read together with it.
        write_resolved_config(session.run, session.config)
        train.record_results(session, evaluation, time.monotonic())
    session.records.close()
    return RunRecord(session.run)


def check_results(
    subject: StepUnderTest,
    session: TrainingSession,
    record: RunRecord,
    documents: dict[str, ExpectedDocument],
    calibration_error: float,
) -> list[CheckFinding]:
    """Check the files of a run against the recomputed documents."""
    return _rows(subject, record, documents) or _summary(
        subject, session, record, documents, calibration_error
    )


def check_sample(session: TrainingSession) -> list[CheckFinding]:
    """Check the text after a prompt, and after none: bytes, number of tokens and random stream."""
    config, texts = session.config, {_PROMPT: session.run.sample.read_text(encoding="utf-8")}
    unprompted = replace(config, train=replace(config.train, sample_prompt=""))
    texts[""] = generate_sample(replace(session, config=unprompted), session.state.model)
    plain = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    for prompt, text in texts.items():
        ids = torch.tensor(list(prompt.encode()) or [END_OF_TEXT])
        key = stream_key(config.seed, "sample")
        tokens = generate(session.state.model, ids, key, config.machine, plain)
        drawn = bytes(t for t in itertools.islice(tokens, _SAMPLED) if t != END_OF_TEXT)
        expected = f"{prompt}{drawn.decode(errors='replace')}\n"
        if text != expected:
            what = f"the sample {expected!r} of {_SAMPLED} tokens after {prompt!r}"
            return [CheckFinding("text-sample", what, repr(text))]
    return []


@torch.no_grad()
def scored_documents(
    model: GPT, windows: list[ExpectedWindow], bf16: bool
) -> tuple[dict[str, ExpectedDocument], float]:
    """Return the scores of each document, sorted by name, and the expected calibration error."""
    documents: dict[str, ExpectedDocument] = {}
    correct, confident = np.zeros(_BINS), np.zeros(_BINS)
    size = model.config.shape.block_size
    model.eval()
    for first in range(0, len(windows), BATCH_ROWS):
        batch = windows[first : first + BATCH_ROWS]
        # Products of one shape, so that logits have the same bits as the product's.
        x_BT = torch.zeros(len(batch), size, dtype=torch.int64)
        for row, window in enumerate(batch):
            x_BT[row, : len(window.tokens) - 1] = torch.tensor(window.tokens[:-1])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = model(x_BT)
        probabilities_BTV = logits_BTV.double().softmax(-1)
        for row, (window, probabilities_TV) in enumerate(
            zip(batch, probabilities_BTV, strict=True)
        ):
            targets = window.tokens[1:]
            new = ExpectedDocument(place=(first // BATCH_ROWS, row))
            document = documents.setdefault(window.document, new)
            document.parts[window.start] = targets
            document.tokens += len(targets)
            document.bytes += sum(len(_WIDE.get(t, b"-")) for t in targets if t != END_OF_TEXT)
            for probabilities_V, target in zip(probabilities_TV.numpy(), targets, strict=False):
                document.nll -= math.log(probabilities_V[target])
                best = int(probabilities_V.argmax())
                document.correct += best == target
                bin_ = math.ceil(probabilities_V[best] * _BINS) - 1
                correct[bin_] += best == target
                confident[bin_] += probabilities_V[best]
    model.train()
    tokens = sum(document.tokens for document in documents.values())
    return dict(sorted(documents.items())), float(abs(correct - confident).sum() / tokens)


def _rows(
    subject: StepUnderTest, record: RunRecord, expected: dict[str, ExpectedDocument]
) -> list[CheckFinding]:
    """Compare the rows of per_query.csv with the recomputed documents."""
    texts = {f"val.jsonl:{n}": text for n, text in enumerate(subject.context.held_out, 1)}
    steps = len(subject.traced_run.losses)
    names = [row.item_id for row in record.documents]
    if names != list(expected):
        what = f"rows of the documents {', '.join(expected)}"
        return [CheckFinding("document-rows", what, ", ".join(names))]
    for row, document in zip(record.documents, expected.values(), strict=True):
        counts = (row.n_tokens, row.n_bytes, row.n_correct)
        expected_counts = (document.tokens, document.bytes, document.correct)
        if counts != expected_counts:
            what = f"{row.item_id}: tokens, bytes and correct predictions {expected_counts}"
            return [CheckFinding("document-rows", what, f"{counts}")]
        if not math.isclose(row.nll_sum, document.nll, rel_tol=_TOLERANCE):
            what = f"{row.item_id}: {document.nll:.6f} nats over {document.tokens} tokens"
            return [CheckFinding("document-rows", what, f"{row.nll_sum:.6f}")]
        targets = np.concatenate([document.parts[start] for start in sorted(document.parts)])
        parts = texts[row.item_id].encode(), targets.astype("<u2").tobytes()
        columns: dict[str, tuple[Any, ...]] = {
            "doc_sha256, tokens_sha256": tuple(hashlib.sha256(b).hexdigest() for b in parts),
            "batch_index, row_in_batch": document.place,
            "source, split, eval_step": ("custom", "val", steps),
        }
        for title, values in columns.items():
            actual = tuple(vars(row)[name] for name in title.split(", "))
            if actual != values:
                what = f"{row.item_id}: {title} {values}"
                return [CheckFinding("document-rows", what, f"{actual}")]
    return _derived_columns(record, expected)


def _derived_columns(
    record: RunRecord, expected: dict[str, ExpectedDocument]
) -> list[CheckFinding]:
    """Check the columns of per_query.csv that the product computes from others, as written."""
    content = record.run.per_query.read_bytes().decode()
    if "\r" in content:
        what = "lines of per_query.csv that end with a line feed alone"
        return [CheckFinding("document-rows", what, "carriage returns")]
    for line, document in zip(csv.DictReader(content.splitlines()), expected.values(), strict=True):
        nats, n_bytes = document.nll, document.bytes
        # An empty cell, if there are no bytes, is NaN.
        bits = nats / math.log(2) / n_bytes if n_bytes else math.nan
        for column, value in {"nll_mean": nats / document.tokens, "bits_per_byte": bits}.items():
            if not np.isclose(float(line[column] or "nan"), value, _TOLERANCE, 0.0, equal_nan=True):
                what = f"{line['item_id']}: {column} {value:.7g}"
                return [CheckFinding("document-rows", what, line[column] or "none")]
    return []


def _expected_figures(
    subject: StepUnderTest, documents: dict[str, ExpectedDocument], calibration_error: float
) -> dict[str, float]:
    """Return the figures of summary.json, from the documents and the traced run."""
    tokens = sum(document.tokens for document in documents.values())
    nats = math.fsum(document.nll for document in documents.values())
    text_bytes = sum(document.bytes for document in documents.values())
    traced = subject.traced_run
    steps = len(traced.losses)
    shares = np.unique(subject.context.train_tokens, return_counts=True)[1]
    shares = shares / shares.sum()
    return {
        "val_loss": nats / tokens,
        "val_perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / text_bytes / math.log(2),
        "token_accuracy": sum(document.correct for document in documents.values()) / tokens,
        "eval_tokens": tokens,
        "eval_documents": len(documents),
        "expected_calibration_error": calibration_error,
        # The last tenth of the iterations, at least one.
        "train_loss": traced.losses[-1],
        "iterations": steps,
        "tokens": steps * subject.small.train.global_batch * subject.small.model.shape.block_size,
        "unigram_entropy": -float((shares * np.log(shares)).sum()),
        "parameters": sum(weight.numel() for weight in traced.initial_weights.values()),
        "sparsity": traced.sparsity[-1] if traced.pruned_steps else 0.0,
    }


def _summary(
    subject: StepUnderTest,
    session: TrainingSession,
    record: RunRecord,
    documents: dict[str, ExpectedDocument],
    calibration_error: float,
) -> list[CheckFinding]:
    """Compare the figures of summary.json, which tables read, and the last row of the metrics."""
    expected = _expected_figures(subject, documents, calibration_error)
    traced, state = subject.traced_run, session.state
    final = record.summary.value(dict, "final")
    findings = [
        CheckFinding("final-result", f"{name} {value:.7g} in summary.json", f"{final[name]}")
        for name, value in expected.items()
        if not math.isclose(final[name], value, rel_tol=10 * _TOLERANCE, abs_tol=_TOLERANCE)
    ]
    texts = {"schema_version": _SCHEMA, "seed": subject.small.seed}
    zeros = {
        name: (state.weights()[name][:rows] == 0).double().mean().item()
        for name, rows in (prunable_rows(subject) if traced.pruned_steps else {}).items()
    }
    if final["sparsity_by_layer"] != zeros:
        what = f"the zeros of {len(zeros)} prunable matrices in summary.json"
        findings.append(CheckFinding("final-result", what, f"{final['sparsity_by_layer']}"))
    order = final["data_order_digest"]
    found = {name: record.summary.value(int, name) for name in texts}
    if found != texts or order != state.order.digest:
        what = f"{texts} and the order of the data {state.order.digest} in summary.json"
        findings.append(CheckFinding("final-result", what, f"{found}, {order}"))
    total = math.fsum(row.nll_sum for row in record.documents) / expected["eval_tokens"]
    last = record.eval_rows[-1].val_loss
    pairs = {"the results table": record.final.val_loss, "the last evaluation row": last}
    findings += [
        CheckFinding(
            "exact-sum", f"a loss of {total!r} in {where}, as in per_query.csv", f"{loss!r}"
        )
        for where, loss in pairs.items()
        if loss != total
    ]
    return findings
