"""The loss of the results table is the mean over the tokens of the configured held-out windows.

Everything is recomputed from the texts of the held-out documents, the model's logits and the values
of the symbols. B rows of a batch, T tokens, V vocabulary.
"""

import hashlib
import math
import pickle
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gpt2 import train
from gpt2.check.cases import CheckFinding
from gpt2.check.short_run import TracedRun
from gpt2.check.subject import StepUnderTest
from gpt2.data.store import TokenSplit, evaluation_windows
from gpt2.evaluate import EvaluationResult
from gpt2.model import GPT
from gpt2.training.records import RecordWriter
from lib.runs.record import EvalRow, RunRecord
from lib.runs.run_dir import RunDir

# Rows of a batch: the last batch of five windows has fewer.
_BATCH = 2
_END_OF_TEXT = 256
# Log-probabilities in fp32 against float64.
_TOLERANCE = 1e-6
_BINS = 15
_FACTOR = 2.0


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

    tokens: int = 0
    bytes: int = 0
    correct: int = 0
    nll: float = 0.0


def check_evaluated(subject: StepUnderTest) -> list[CheckFinding]:
    """Evaluate the traced run twice, write its results, and recompute all of them."""
    session = subject.traced_run.run.session
    model = session.state.model
    expected_windows = _windows(subject)
    with ExitStack() as stack:
        findings = _side_effects(subject.traced_run)
        stack.enter_context(mock.patch.object(session.evaluate, "batch_size", _BATCH))
        # Other weights, so that nothing of the first evaluation may be used again. With larger
        # matrices, losses differ enough for a mean over tokens to differ from other means.
        session.state.load_weights(_enlarged(subject.traced_run.final_weights))
        stack.callback(session.state.load_weights, subject.traced_run.final_weights)
        record = _finish(subject)
        precision = subject.small.values["PRECISION"]
        documents, calibration_error = _evaluate(model, expected_windows, precision == "bf16")
    return findings + (
        _selection(subject, expected_windows)
        or _rows(record, documents)
        or _summary(subject, record, documents, calibration_error)
    )


def _enlarged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with larger matrices."""
    return {name: w * _FACTOR if w.ndim >= 2 else w for name, w in weights.items()}


def _windows(subject: StepUnderTest) -> list[ExpectedWindow]:
    """Return the windows of the configured budget, by the rule in ``docs/data.md``."""
    size = subject.small.model.shape.block_size
    windows: list[ExpectedWindow] = []
    for number, text in enumerate(subject.context.held_out, 1):
        digest = hashlib.sha256(text.encode()).hexdigest()
        windows += _cut(f"val.jsonl:{number}", [*text.encode(), _END_OF_TEXT], digest, size)
    return _within_budget(windows, int(subject.small.values["EVAL_TOKENS"]))


def _cut(document: str, ids: list[int], digest: str, size: int) -> Iterator[ExpectedWindow]:
    """Yield windows that predict ``size`` tokens each; the last one predicts the remaining tokens."""
    for start in range(0, len(ids) - 1, size):
        order = hashlib.sha256(f"{digest}:{start}".encode()).digest()
        yield ExpectedWindow(document, start, ids[start : start + size + 1], order)


def _within_budget(windows: list[ExpectedWindow], budget: int) -> list[ExpectedWindow]:
    """Return the first windows by digest whose predicted tokens do not exceed ``budget``."""
    chosen = []
    for window in sorted(windows, key=lambda window: window.order):
        budget -= len(window.tokens) - 1
        if budget < 0:
            break
        chosen.append(window)
    return chosen


def _selection(
    subject: StepUnderTest, expected_windows: list[ExpectedWindow]
) -> list[CheckFinding]:
    """Check the windows of the run, and those of token files, which have no documents."""
    session = subject.traced_run.run.session
    starts: dict[str, int] = {}
    offset = 0
    for number, text in enumerate(subject.context.held_out, 1):
        starts[f"val.jsonl:{number}"] = offset
        offset += len(text.encode()) + 1
    actual = [(w.document, w.offset, w.length) for w in session.evaluate.windows]
    expected = [(w.document, starts[w.document] + w.start, len(w.tokens)) for w in expected_windows]
    what = "held-out windows (document, offset, tokens)"
    findings = _different_windows(what, actual, expected)
    path = subject.context.folder / "text" / "val.bin"
    ids, size = subject.context.tokens, subject.small.model.shape.block_size
    ids.tofile(path)
    budget = int(subject.small.values["EVAL_TOKENS"])
    split = TokenSplit("val", [path], None)
    actual = [(w.document, w.offset, w.length) for w in evaluation_windows(split, size, budget)]
    windows = _within_budget(list(_cut("", ids.tolist(), "val", size)), budget)
    expected = [(f"window-{w.start // size:06d}", w.start, len(w.tokens)) for w in windows]
    findings += _different_windows(f"{what} of a token file", actual, expected)
    shards = TokenSplit("val", [path, path], None)
    whole = shards.n_tokens == 2 * len(ids)
    across = shards.window(len(ids) - 1, 2).tolist() if whole else []
    if across != [int(ids[-1]), int(ids[0])]:
        text = f"{2 * len(ids)} tokens of two shards in order"
        findings.append(CheckFinding("shards", text, f"{shards.n_tokens} tokens, or another order"))
    return findings


def _different_windows(
    what: str, actual: Sequence[tuple[str, int, int]], expected: Sequence[tuple[str, int, int]]
) -> list[CheckFinding]:
    if actual == expected:
        return []
    count = f"{sum(w[2] - 1 for w in actual)} tokens in {len(actual)} windows"
    first = next((a for a, e in zip(actual, expected, strict=False) if a != e), None)
    text = f"{sum(w[2] - 1 for w in expected)} tokens in {len(expected)} {what}"
    found = count if first is None else f"{count}, the first other one {first}"
    return [CheckFinding("evaluation-windows", text, found)]


def _generators() -> tuple[bytes, str, bytes]:
    """Return the states of all generators that training uses."""
    numpy = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), pickle.dumps(numpy)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a copy of all tensors of the optimizer's state."""
    states = [state.values() for state in optimizer.state.values()]
    return [value.clone() for values in states for value in values if isinstance(value, Tensor)]


def _side_effects(traced: TracedRun) -> list[CheckFinding]:
    """Evaluate once, and check that the evaluation leaves everything of the training unchanged."""
    session = traced.run.session
    state, optimizer = session.state, cast(torch.optim.Optimizer, session.state.optimizer)
    before, tensors = _generators(), _optimizer_tensors(optimizer)
    # All windows in one batch take the least time.
    with mock.patch.object(session.evaluate, "batch_size", len(session.evaluate.windows)):
        evaluation = session.evaluate(state.model)
    modes = [name for name, module in state.model.named_modules() if not module.training]
    weights = state.weights()
    changed = [n for n in weights if not torch.equal(weights[n], traced.final_weights[n])]
    pairs = zip(tensors, _optimizer_tensors(optimizer), strict=True)
    changed += ["the optimizer's state"] * any(not torch.equal(a, b) for a, b in pairs)
    gradients = [n for n, p in state.model.named_parameters() if p.grad is not None]
    violations = {
        "evaluation-random-state": ["another state of the generators"] * (_generators() != before),
        "evaluation-mode": [f"{name or 'the model'} in evaluation mode" for name in modes],
        "evaluation-weights": [f"other values of {name}" for name in changed],
        "evaluation-gradient": [f"a gradient of {name}" for name in gradients],
    }
    findings = [
        CheckFinding(name, "training as if there were no evaluation", texts[0])
        for name, texts in violations.items()
        if texts
    ]
    return findings + _accumulation(evaluation)


def _accumulation(evaluation: EvaluationResult | None) -> list[CheckFinding]:
    """Check that sums over tokens have more digits than fp32, and loss and accuracy of the rows."""
    documents = evaluation.documents if evaluation else ()
    sums = [document.nll_sum for document in documents]
    if evaluation is None or all(float(np.float32(total)) == total for total in sums):
        what = "losses summed in float64"
        return [CheckFinding("evaluation-sums", what, f"{len(sums)} sums with the digits of fp32")]
    tokens = sum(document.n_tokens for document in documents)
    expected = sum(sums) / tokens, sum(document.n_correct for document in documents) / tokens
    actual = evaluation.loss, evaluation.accuracy
    if all(map(math.isclose, actual, expected)):
        return []
    what, figures = "loss and accuracy of an evaluation: {:.6g} and {:.6g}", "{:.6g} and {:.6g}"
    return [
        CheckFinding("evaluation-figures", what.format(*expected), figures.format(*actual)),
    ]


def _finish(subject: StepUnderTest) -> RunRecord:
    """Evaluate the present weights and write the results as the trainer does at the end of a run."""
    traced = subject.traced_run
    session = traced.run.session
    files = RunDir(subject.context.new_run_dir())
    records = RecordWriter(files, lambda event: None)
    # Steps of the traced run were not timed, and speeds are per second.
    with mock.patch.multiple(session, run=files, records=records), session.state.clock:
        for i, loss in enumerate(traced.losses, 1):
            row = {"iteration": i, "tokens": i, "lr": 0.0, "loss": loss, "grad_norm": None}
            records.metrics(kind="train", **row)
        # An earlier and better evaluation, which is not the result.
        earlier = {"iteration": 1, "tokens": 1, "val_loss": 1.0, "token_accuracy": 1.0}
        records.metrics(kind="eval", **earlier, sparsity=0.0)
        evaluation = session.evaluate(session.state.model)
        assert evaluation is not None
        train.record_results(session, evaluation, time.monotonic())
    records.close()
    return RunRecord(files)


@torch.no_grad()
def _evaluate(
    model: GPT, windows: list[ExpectedWindow], bf16: bool
) -> tuple[dict[str, ExpectedDocument], float]:
    """Return the scores of each document, sorted by name, and the expected calibration error."""
    documents: dict[str, ExpectedDocument] = {}
    correct, confident = np.zeros(_BINS), np.zeros(_BINS)
    size = model.config.shape.block_size
    model.eval()
    for first in range(0, len(windows), _BATCH):
        batch = windows[first : first + _BATCH]
        # Products of one shape, so that logits have the same bits as the product's.
        x_BT = torch.zeros(len(batch), size, dtype=torch.int64)
        for row, window in enumerate(batch):
            x_BT[row, : len(window.tokens) - 1] = torch.tensor(window.tokens[:-1])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = model(x_BT)
        probabilities_BTV = logits_BTV.double().softmax(-1)
        for window, probabilities_TV in zip(batch, probabilities_BTV, strict=True):
            targets = window.tokens[1:]
            document = documents.setdefault(window.document, ExpectedDocument())
            document.tokens += len(targets)
            document.bytes += sum(target != _END_OF_TEXT for target in targets)
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


def _rows(record: RunRecord, expected: dict[str, ExpectedDocument]) -> list[CheckFinding]:
    """Compare the rows of per_query.csv with the recomputed documents."""
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
    return []


def _summary(
    subject: StepUnderTest,
    record: RunRecord,
    documents: dict[str, ExpectedDocument],
    calibration_error: float,
) -> list[CheckFinding]:
    """Compare the figures of summary.json, which tables read, and the last row of the metrics."""
    tokens = sum(document.tokens for document in documents.values())
    nats = math.fsum(document.nll for document in documents.values())
    text_bytes = sum(document.bytes for document in documents.values())
    traced = subject.traced_run
    expected = {
        "val_loss": nats / tokens,
        "val_perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / text_bytes / math.log(2),
        "token_accuracy": sum(document.correct for document in documents.values()) / tokens,
        "eval_tokens": tokens,
        "eval_documents": len(documents),
        "expected_calibration_error": calibration_error,
        # The last tenth of the iterations, at least one.
        "train_loss": traced.losses[-1],
        "iterations": len(traced.losses),
        "parameters": sum(weight.numel() for weight in traced.initial_weights.values()),
    }
    final = record.summary.value(dict, "final")
    findings = [
        CheckFinding("final-result", f"{name} {value:.7g} in summary.json", f"{final[name]}")
        for name, value in expected.items()
        if not math.isclose(final[name], value, rel_tol=10 * _TOLERANCE, abs_tol=_TOLERANCE)
    ]
    total = math.fsum(row.nll_sum for row in record.documents) / tokens
    last = [row.val_loss for row in record.metrics if isinstance(row, EvalRow)][-1]
    pairs = {"the results table": record.summary.final.val_loss, "the last evaluation row": last}
    findings += [
        CheckFinding(
            "exact-sum", f"a loss of {total!r} in {where}, as in per_query.csv", f"{loss!r}"
        )
        for where, loss in pairs.items()
        if loss != total
    ]
    return findings
