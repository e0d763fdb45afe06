"""The loss of the results table is the mean over the tokens of the configured held-out windows.

Everything that a run writes at its end is recomputed from the texts of the held-out documents, the
model's logits and the values of the symbols. B rows of a batch, T tokens, V vocabulary.
"""

import csv
import hashlib
import itertools
import math
import pickle
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from gpt2.check.finding import CheckFinding, compare, expect
from gpt2.check.pairing_checks import stream_key
from gpt2.check.short_run import TracedRun
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import prunable_rows
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.evaluate import Evaluator
from gpt2.generate import SamplingOptions, generate
from gpt2.loss import IGNORE_INDEX
from gpt2.model import GPT
from gpt2.records.files import write_resolved_config
from gpt2.training import loop
from gpt2.training.metrics import record_statistics
from gpt2.training.records import RecordWriter
from gpt2.training.results import generate_sample
from gpt2.training.state import TrainingSession
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

_FACTOR = 2.0
_END_OF_TEXT = 256
# Rows of a batch: the last batch of five windows has fewer. No other number of the small form.
_BATCH_ROWS = 3
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
class _Window:
    """Held-out window of a document: ``tokens`` from its token ``start`` on.

    The document starts at ``offset`` of the split.
    """

    number: int
    offset: int
    start: int
    tokens: list[int]


@dataclass
class _Document:
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


def check_evaluated(subject: StepUnderTest) -> list[CheckFinding]:
    """Evaluate the traced run twice, write its results, and recompute all of them."""
    traced, windows = subject.traced_run, _windows(subject)
    state, session = traced.run.session, _finishing_session(subject)
    with ExitStack() as stack:
        findings = _side_effects(traced, session)
        # Other weights, so that nothing of the first evaluation may be used again. With larger
        # matrices, losses differ enough for a mean over tokens to differ from other means.
        weights = traced.final_weights.items()
        state.load_weights({n: w * _FACTOR if w.ndim >= 2 else w for n, w in weights})
        stack.callback(state.load_weights, traced.final_weights)
        record = _finish(session, traced.losses)
        findings += _sample(session)
        bf16 = subject.small.values["PRECISION"] == "bf16"
        documents, calibration_error = _scored(state.model, windows, bf16)
        stored = safetensors.torch.load_file(session.run.weights)
        differing = [n for n, w in state.weights().items() if not _is_stored(w, stored.get(n))]
        what = "the evaluated weights in model.safetensors"
        findings += expect(not differing, "stored-weights", what, f"others of {differing[:3]}")
    actual = [(w.document, w.offset, w.length) for w in traced.run.session.evaluate.windows]
    expected = [(w.number - 1, w.offset + w.start, len(w.tokens)) for w in windows]
    count = sum(len(w.tokens) - 1 for w in windows)
    what = f"{count} tokens in held-out windows (document, offset, tokens)"
    return findings + (
        compare("evaluation-windows", what, actual, expected)
        or _rows(subject, record, documents)
        or _summary(subject, session, record, documents, calibration_error)
    )


def _is_stored(weight: Tensor, stored: Tensor | None) -> bool:
    return stored is not None and stored.dtype == weight.dtype and torch.equal(stored, weight)


def _windows(subject: StepUnderTest) -> list[_Window]:
    """Return the windows of the configured budget, by the rule in ``docs/data.md``.

    A window predicts as many tokens as the context has, the last one of a document the remaining
    ones. The first windows by digest are taken whose predicted tokens do not exceed the budget.
    """
    size, budget = subject.small.model.shape.block_size, int(subject.small.values["EVAL_TOKENS"])
    ordered: list[tuple[bytes, _Window]] = []
    offset = 0
    for number, text in enumerate(subject.context.held_out, 1):
        digest, ids = hashlib.sha256(text.encode()).hexdigest(), [*text.encode(), _END_OF_TEXT]
        for start in range(0, len(ids) - 1, size):
            order = hashlib.sha256(f"{digest}:{start}".encode()).digest()
            window = _Window(number, offset, start, ids[start : start + size + 1])
            ordered.append((order, window))
        offset += len(ids)
    windows = [window for _, window in sorted(ordered, key=lambda pair: pair[0])]
    used = itertools.accumulate(len(window.tokens) - 1 for window in windows)
    return [window for window, total in zip(windows, used, strict=True) if total <= budget]


def _generators() -> tuple[bytes, str, bytes]:
    """Return the states of all generators that training uses."""
    numpy = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), pickle.dumps(numpy)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a copy of all tensors of the optimizer's state."""
    states = [state.values() for state in optimizer.state.values()]
    return [value.clone() for values in states for value in values if isinstance(value, Tensor)]


def _side_effects(traced: TracedRun, session: TrainingSession) -> list[CheckFinding]:
    """Evaluate once and record statistics; check that this leaves the training unchanged."""
    state, modes = session, list[str]()
    optimizer = cast(torch.optim.Optimizer, state.optimizer)
    before, tensors = _generators(), _optimizer_tensors(optimizer)
    evaluation = session.evaluate(state.model)
    # Recording statistics restores the mode of all modules.
    modes += [name for name, module in state.model.named_modules() if not module.training]
    record_statistics(session)
    modes += [name for name, module in state.model.named_modules() if not module.training]
    weights, pairs = state.weights(), zip(tensors, _optimizer_tensors(optimizer), strict=True)
    changed = [n for n in weights if not torch.equal(weights[n], traced.final_weights[n])]
    changed += ["the optimizer's state"] * any(not torch.equal(a, b) for a, b in pairs)
    gradients = [n for n, p in state.model.named_parameters() if p.grad is not None]
    violations = {
        "evaluation-random-state": ["another state of the generators"] * (_generators() != before),
        "evaluation-mode": [f"{name or 'the model'} in evaluation mode" for name in modes],
        "evaluation-weights": [f"other values of {name}" for name in changed],
        "evaluation-gradient": [f"a gradient of {name}" for name in gradients],
    }
    findings, what = list[CheckFinding](), "training as if there were no evaluation"
    for name, texts in violations.items():
        findings += expect(not texts, name, what, "".join(texts[:1]))
    assert evaluation is not None
    documents = evaluation.documents
    tokens = sum(document.n_tokens for document in documents)
    correct = sum(document.n_correct for document in documents)
    loss = math.fsum(document.nll_sum for document in documents) / tokens
    what, actual = "loss and accuracy of an evaluation", (evaluation.loss, evaluation.accuracy)
    findings += compare("evaluation-figures", what, actual, (loss, correct / tokens), 1e-9)
    # Of a sound evaluation: what reads more of a model than its losses has a finding above.
    return findings or _accumulation(session)


class _UnevenLosses(nn.Module):
    """Model whose token losses have a sum that fp32 cannot represent: 2^30 and 1 by turns."""

    def __init__(self) -> None:
        super().__init__()
        # Of the tokens that count.
        self.total = 0.0

    def token_losses(self, x_BT: Tensor, y_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, no correct token, and no confidence."""
        losses_BT = torch.ones(y_BT.shape)
        losses_BT[:, ::2] = 2.0**30
        self.total += losses_BT[y_BT != IGNORE_INDEX].double().sum().item()
        return losses_BT, torch.zeros(y_BT.shape, dtype=torch.bool), torch.zeros(y_BT.shape)


def _accumulation(session: TrainingSession) -> list[CheckFinding]:
    """Check that an evaluation sums the losses of tokens in float64."""
    model = _UnevenLosses()
    evaluation = session.evaluate(cast(GPT, model))
    actual = math.fsum(document.nll_sum for document in evaluation.documents) if evaluation else 0.0
    what = "losses of 2^30 and 1 by turns summed in float64:"
    return compare("evaluation-sums", what, actual, model.total)


# Results that a run writes: rows, summary and text sample.


def _finishing_session(subject: StepUnderTest) -> TrainingSession:
    """Return the traced session with its own folder, a sample, and batches of another size.

    It has one evaluator for all evaluations, which may store nothing of the first one.
    """
    session = subject.traced_run.run.session
    files, config = RunDir(subject.context.new_run_dir()), session.config
    sampling: dict[str, Any] = {"sample_tokens": _SAMPLED, "sample_prompt": _PROMPT}
    rows = _BATCH_ROWS * config.train.grad_accumulation
    batched = replace(config.train, global_batch=rows, batch_size=_BATCH_ROWS)
    evaluate = Evaluator(replace(config, train=batched), session.dataset.val, session.device)
    config = replace(
        config,
        # The sample is that of the seed, whatever the seed is.
        seed=config.seed + 1,
        train=replace(config.train, **sampling),
        telemetry=replace(config.telemetry, statistics_rows=1),
    )
    return replace(
        session,
        run=files,
        records=RecordWriter(files, lambda event: None),
        config=config,
        tokenizer=_Gpt2Bytes(),
        evaluate=evaluate,
    )


def _finish(session: TrainingSession, losses: Sequence[float]) -> RunRecord:
    """Evaluate the present weights and write the results as the trainer does at the end of a run."""
    # Steps of the traced run were not timed, and speeds are per second.
    with session.clock:
        for i, loss in enumerate(losses, 1):
            # Only the last step has no gradient.
            norm = 0.0 if i == len(losses) else 1.0
            row = {"iteration": i, "tokens": i, "lr": 0.0, "loss": loss, "grad_norm": norm}
            session.records.metrics(kind="train", **row)
        # An earlier and better evaluation, which is not the result.
        earlier = {"iteration": 1, "tokens": 1, "val_loss": 1.0, "token_accuracy": 1.0}
        session.records.metrics(kind="eval", **earlier, sparsity=0.0)
        evaluation = session.evaluate(session.model)
        assert evaluation is not None
        # The launcher writes it before training; results are read together with it.
        write_resolved_config(session.run, session.config)
        loop.record_results(session, evaluation, time.monotonic())
    session.records.close()
    return RunRecord(session.run)


def _sample(session: TrainingSession) -> list[CheckFinding]:
    """Check the text after a prompt, and after none: bytes, number of tokens and random stream."""
    config, texts = session.config, {_PROMPT: session.run.sample.read_text(encoding="utf-8")}
    unprompted = replace(config, train=replace(config.train, sample_prompt=""))
    texts[""] = generate_sample(replace(session, config=unprompted), session.model)
    plain = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    findings = []
    for prompt, text in texts.items():
        ids = torch.tensor(list(prompt.encode()) or [_END_OF_TEXT])
        key = stream_key(config.seed, "sample")
        tokens = generate(session.model, ids, key, config.machine, plain)
        drawn = bytes(t for t in itertools.islice(tokens, _SAMPLED) if t != _END_OF_TEXT)
        expected = repr(f"{prompt}{drawn.decode(errors='replace')}\n")
        what = f"a sample of {_SAMPLED} tokens after {prompt!r}:"
        findings += compare("text-sample", what, repr(text), expected)
    return findings


@torch.no_grad()
def _scored(model: GPT, windows: list[_Window], bf16: bool) -> tuple[dict[str, _Document], float]:
    """Return the scores of each document, sorted by name, and the expected calibration error."""
    documents: dict[str, _Document] = {}
    correct, confident = np.zeros(_BINS), np.zeros(_BINS)
    size = model.config.shape.block_size
    model.eval()
    for first in range(0, len(windows), _BATCH_ROWS):
        batch = windows[first : first + _BATCH_ROWS]
        # Products of one shape, so that logits have the same bits as the product's.
        x_BT = torch.zeros(len(batch), size, dtype=torch.int64)
        for row, window in enumerate(batch):
            x_BT[row, : len(window.tokens) - 1] = torch.tensor(window.tokens[:-1])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = model(x_BT)
        probabilities_BTV = logits_BTV.double().softmax(-1).numpy()
        for row, window in enumerate(batch):
            targets = window.tokens[1:]
            new = _Document(place=(first // _BATCH_ROWS, row))
            document = documents.setdefault(f"val.jsonl:{window.number}", new)
            document.parts[window.start] = targets
            document.tokens += len(targets)
            document.bytes += sum(len(_WIDE.get(t, b"-")) for t in targets if t != _END_OF_TEXT)
            for probabilities_V, target in zip(probabilities_BTV[row], targets, strict=False):
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
    subject: StepUnderTest, record: RunRecord, expected: dict[str, _Document]
) -> list[CheckFinding]:
    """Compare every column of per_query.csv with the recomputed documents."""
    texts = {f"val.jsonl:{n}": text for n, text in enumerate(subject.context.held_out, 1)}
    content = record.run.per_query.read_bytes().decode()
    rows, what = list(csv.DictReader(content.splitlines())), "lines that end with a line feed alone"
    names = tuple(row["item_id"] for row in rows)
    findings = expect("\r" not in content, "document-rows", what, "carriage returns")
    if findings := findings or compare("document-rows", "rows of", names, tuple(expected)):
        return findings
    for row, (name, document) in zip(rows, expected.items(), strict=True):
        targets = np.concatenate([document.parts[start] for start in sorted(document.parts)])
        # An empty cell, if there are no bytes.
        bits = document.nll / math.log(2) / document.bytes if document.bytes else ""
        columns: dict[str, str | float] = {
            "n_tokens": str(document.tokens),
            "n_bytes": str(document.bytes),
            "n_correct": str(document.correct),
            "nll_sum": document.nll,
            "nll_mean": document.nll / document.tokens,
            "bits_per_byte": bits,
            "doc_sha256": hashlib.sha256(texts[name].encode()).hexdigest(),
            "tokens_sha256": hashlib.sha256(targets.astype("<u2").tobytes()).hexdigest(),
            "batch_index": str(document.place[0]),
            "row_in_batch": str(document.place[1]),
            "source": "custom",
            "split": "val",
            "eval_step": str(len(subject.traced_run.losses)),
        }
        for column, value in columns.items():
            cell = float(row[column]) if isinstance(value, float) else row[column]
            findings += compare("document-rows", f"{name}: {column}", cell, value, _TOLERANCE)
    return findings[:1]


def _summary(
    subject: StepUnderTest,
    session: TrainingSession,
    record: RunRecord,
    documents: dict[str, _Document],
    calibration_error: float,
) -> list[CheckFinding]:
    """Compare the figures of summary.json, which tables read, and the last row of the metrics."""
    tokens = sum(document.tokens for document in documents.values())
    nats = math.fsum(document.nll for document in documents.values())
    text_bytes = sum(document.bytes for document in documents.values())
    traced, small, state = subject.traced_run, subject.small, session
    steps = len(traced.losses)
    shares = np.unique(subject.context.train_tokens, return_counts=True)[1]
    shares = shares / shares.sum()
    zeros = {
        name: (state.weights()[name][:rows] == 0).double().mean().item()
        for name, rows in (prunable_rows(subject) if traced.pruned_steps else {}).items()
    }
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
        "iterations": steps,
        "tokens": steps * small.train.global_batch * small.model.shape.block_size,
        "unigram_entropy": -float((shares * np.log(shares)).sum()),
        "parameters": sum(weight.numel() for weight in traced.initial_weights.values()),
        "sparsity": traced.sparsity[-1] if traced.pruned_steps else 0.0,
        "sparsity_by_layer": zeros,
        "data_order_digest": state.order.digest,
    }
    final = record.summary.value(dict, "final")
    headed = {name: record.summary.value(int, name) for name in ("schema_version", "seed")}
    expected |= {"schema_version": _SCHEMA, "seed": session.config.seed}
    findings = []
    for name, value in expected.items():
        found, what = (final | headed)[name], f"in summary.json {name}"
        findings += compare("final-result", what, found, value, 10 * _TOLERANCE)
    total = math.fsum(row.nll_sum for row in record.documents) / tokens
    losses = {"results table": record.final.val_loss, "evaluation": record.eval_rows[-1].val_loss}
    for where, loss in losses.items():
        what = f"as in per_query.csv a loss of the last {where} of"
        findings += compare("exact-sum", what, loss, total)
    return findings
