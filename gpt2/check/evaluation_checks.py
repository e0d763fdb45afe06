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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from gpt2.check.finding import CheckFinding, compare, expect
from gpt2.check.pairing_checks import stream_key
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
# Of a probability in fp32.
_ROUNDING = 1e-7
# A prompt of other bytes than characters, and the tokens of a sample.
_PROMPT, _SAMPLED = "Hä", 3
# Bytes of a frequent token: one character in UTF-8.
_WIDE = {ord("e"): "é".encode()}


@dataclass
class _Window:
    """Held-out window of a document: ``tokens`` from its token ``start`` on, and its scores.

    The document starts at ``offset`` of the split.
    """

    number: int
    offset: int
    start: int
    tokens: list[int]
    # Its batch, and row in the batch.
    place: tuple[int, int] = (0, 0)
    # Of each predicted token: nats, whether it is the most likely one, and the highest probability.
    nats: list[float] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Return the bytes of the predicted tokens."""
        return sum(len(_WIDE.get(t, b"-")) for t in self.tokens[1:] if t != _END_OF_TEXT)


class _Gpt2Bytes(ByteTokenizer):
    """Bytes of tokens as GPT-2's tokenizer has them: more than one, and an end of text by name."""

    def token_bytes(self, token: int) -> bytes:
        """Return the byte, two bytes of one character, or the name of the end-of-text token."""
        return _WIDE.get(token) or super().token_bytes(token) or b"<|endoftext|>"


def check_evaluated(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Evaluate the traced run twice, write its results, and recompute all of them."""
    traced, windows = subject.traced_run, _windows(subject)
    state, session = traced.session, _finishing_session(subject)
    yield from _side_effects(session, traced.final_weights)
    # Other weights, so that nothing of the first evaluation may be used again. With larger matrices,
    # losses differ enough for a mean over tokens to differ from other means.
    weights = traced.final_weights.items()
    state.load_weights({n: w * _FACTOR if w.ndim >= 2 else w for n, w in weights})
    try:
        record = _finish(session, traced.losses)
        yield from _sample(session)
        _score(state.model, windows, subject.small.values["PRECISION"] == "bf16")
        stored = safetensors.torch.load_file(session.run.weights)
        differing = [
            name
            for name, weight in state.weights().items()
            if name not in stored
            or stored[name].dtype != weight.dtype
            or not torch.equal(stored[name], weight)
        ]
        expected_summary = _expected_summary(subject, session, windows)
    finally:
        state.load_weights(traced.final_weights)
    what, found = "the evaluated weights in model.safetensors", f"others of {differing[:3]}"
    yield from expect(not differing, "stored-weights", what, found)
    actual = [(w.document, w.offset, w.length) for w in session.evaluate.windows]
    expected = [(w.number - 1, w.offset + w.start, len(w.tokens)) for w in windows]
    count = sum(len(w.tokens) - 1 for w in windows)
    what = f"{count} tokens in held-out windows (document, offset, tokens)"
    yield from (
        compare("evaluation-windows", what, actual, expected)
        or _rows(subject, record, windows)
        or _summary(record, expected_summary, count)
    )


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


def _state(session: TrainingSession) -> tuple[Any, dict[str, Tensor]]:
    """Return the states of all generators that training uses, and copies of all trained tensors."""
    numpy = pickle.dumps(np.random.get_state(legacy=True))
    generators = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), numpy
    tensors = {name: weight.clone() for name, weight in session.weights().items()}
    for i, state in enumerate(cast(torch.optim.Optimizer, session.optimizer).state.values()):
        copies = {f"the optimizer's {k} {i}": v for k, v in state.items() if isinstance(v, Tensor)}
        tensors |= {name: value.clone() for name, value in copies.items()}
    return generators, tensors


def _side_effects(
    session: TrainingSession, weights: Mapping[str, Tensor]
) -> Iterator[CheckFinding]:
    """Evaluate once and record statistics; check that this leaves the training unchanged."""
    model, modes = session.model, list[str]()
    generators, tensors = _state(session)
    evaluation = session.evaluate(model)
    # Recording statistics restores the mode of all modules.
    modes += [name for name, module in model.named_modules() if not module.training]
    record_statistics(session)
    modes += [name for name, module in model.named_modules() if not module.training]
    generators_after, after = _state(session)
    changed = [
        n for n, value in (tensors | dict(weights)).items() if not torch.equal(value, after[n])
    ]
    gradients = [n for n, p in model.named_parameters() if p.grad is not None]
    other = ["another state of the generators"] * (generators_after != generators)
    violations = {
        "evaluation-random-state": other,
        "evaluation-mode": [f"{name or 'the model'} in evaluation mode" for name in modes],
        "evaluation-weights": [f"other values of {name}" for name in changed],
        "evaluation-gradient": [f"a gradient of {name}" for name in gradients],
    }
    what = "training as if there were no evaluation"
    for name, texts in violations.items():
        yield from expect(not texts, name, what, "".join(texts[:1]))
    assert evaluation is not None
    tokens, correct = (
        sum(vars(document)[name] for document in evaluation.documents)
        for name in ("n_tokens", "n_correct")
    )
    loss = math.fsum(document.nll_sum for document in evaluation.documents) / tokens
    what, actual = "loss and accuracy of an evaluation", (evaluation.loss, evaluation.accuracy)
    yield from compare("evaluation-figures", what, actual, (loss, correct / tokens), 1e-9)
    # Of a sound evaluation: what reads more of a model than its losses has a finding above.
    if not any(violations.values()):
        uneven = _UnevenLosses()
        summed = session.evaluate(cast(GPT, uneven))
        assert summed is not None
        total = math.fsum(document.nll_sum for document in summed.documents)
        what = "losses of 2^30 and 1 by turns summed in float64:"
        yield from compare("evaluation-sums", what, total, uneven.total)


class _UnevenLosses(nn.Module):
    """Model whose token losses have a sum that fp32 cannot represent: 2^30 and 1 by turns."""

    # Of the tokens that count.
    total = 0.0

    def token_losses(self, x_BT: Tensor, y_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, no correct token, and no confidence."""
        losses_BT = torch.ones(y_BT.shape)
        losses_BT[:, ::2] = 2.0**30
        self.total += losses_BT[y_BT != IGNORE_INDEX].double().sum().item()
        return losses_BT, torch.zeros(y_BT.shape, dtype=torch.bool), torch.zeros(y_BT.shape)


# Results that a run writes: rows, summary and text sample.


def _finishing_session(subject: StepUnderTest) -> TrainingSession:
    """Return the traced session with its own folder, a sample, and batches of another size."""
    session = subject.traced_run.session
    files, config = RunDir(subject.context.new_run_dir()), session.config
    rows = _BATCH_ROWS * config.train.grad_accumulation
    batched = replace(config.train, global_batch=rows, batch_size=_BATCH_ROWS)
    return replace(
        session,
        run=files,
        records=RecordWriter(files),
        tokenizer=_Gpt2Bytes(),
        evaluate=Evaluator(replace(config, train=batched), session.dataset.val, session.device),
        config=replace(
            config,
            # The sample is that of the seed, whatever the seed is.
            seed=config.seed + 1,
            train=replace(config.train, sample_tokens=_SAMPLED, sample_prompt=_PROMPT),
            telemetry=replace(config.telemetry, statistics_rows=1),
        ),
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


def _sample(session: TrainingSession) -> Iterator[CheckFinding]:
    """Check the text after a prompt, and after none: bytes, number of tokens and random stream."""
    config, texts = session.config, {_PROMPT: session.run.sample.read_text(encoding="utf-8")}
    unprompted = replace(config, train=replace(config.train, sample_prompt=""))
    texts[""] = generate_sample(replace(session, config=unprompted), session.model)
    plain = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    for prompt, text in texts.items():
        ids = torch.tensor(list(prompt.encode()) or [_END_OF_TEXT])
        key = stream_key(config.seed, "sample")
        tokens = generate(session.model, ids, key, config.machine, plain)
        drawn = bytes(t for t in itertools.islice(tokens, _SAMPLED) if t != _END_OF_TEXT)
        expected = repr(f"{prompt}{drawn.decode(errors='replace')}\n")
        what = f"a sample of {_SAMPLED} tokens after {prompt!r}:"
        yield from compare("text-sample", what, repr(text), expected)


@torch.no_grad()
def _score(model: GPT, windows: Sequence[_Window], bf16: bool) -> None:
    """Compute the scores of each window."""
    size = model.config.shape.block_size
    model.eval()
    for number, first in enumerate(range(0, len(windows), _BATCH_ROWS)):
        batch = windows[first : first + _BATCH_ROWS]
        # Products of one shape, so that logits have the same bits as the product's.
        x_BT = torch.zeros(len(batch), size, dtype=torch.int64)
        for row, window in enumerate(batch):
            x_BT[row, : len(window.tokens) - 1] = torch.tensor(window.tokens[:-1])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = model(x_BT)
        probabilities_BTV = logits_BTV.double().softmax(-1).numpy()
        for row, window in enumerate(batch):
            window.place = number, row
            targets = window.tokens[1:]
            probabilities_TV = probabilities_BTV[row, : len(targets)]
            window.nats = (-np.log(probabilities_TV[range(len(targets)), targets])).tolist()
            window.hits = (probabilities_TV.argmax(-1) == targets).tolist()
            window.confidence = probabilities_TV.max(-1).tolist()
    model.train()


def _rows(
    subject: StepUnderTest, record: RunRecord, windows: Sequence[_Window]
) -> list[CheckFinding]:
    """Compare every column of per_query.csv with the recomputed documents."""
    documents: dict[str, list[_Window]] = {}
    for window in windows:
        documents.setdefault(f"val.jsonl:{window.number}", []).append(window)
    content = record.run.per_query.read_bytes().decode()
    rows, what = list(csv.DictReader(content.splitlines())), "lines that end with a line feed alone"
    names = tuple(row["item_id"] for row in rows)
    findings = expect("\r" not in content, "document-rows", what, "carriage returns")
    findings = findings or compare("document-rows", "rows of", names, tuple(sorted(documents)))
    for row in rows if not findings else ():
        name, parts = row["item_id"], documents[row["item_id"]]
        in_order = sorted(parts, key=lambda window: window.start)
        targets = np.concatenate([window.tokens[1:] for window in in_order])
        nats = math.fsum(itertools.chain(*(window.nats for window in parts)))
        text_bytes = sum(window.bytes for window in parts)
        text = subject.context.held_out[parts[0].number - 1]
        columns: dict[str, str | float] = {
            "n_tokens": str(len(targets)),
            "n_bytes": str(text_bytes),
            "n_correct": str(sum(sum(window.hits) for window in parts)),
            "nll_sum": nats,
            "nll_mean": nats / len(targets),
            # An empty cell, if there are no bytes.
            "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else "",
            "doc_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens_sha256": hashlib.sha256(targets.astype("<u2").tobytes()).hexdigest(),
            "batch_index": str(parts[0].place[0]),
            "row_in_batch": str(parts[0].place[1]),
            "source": "custom",
            "split": "val",
            "eval_step": str(len(subject.traced_run.losses)),
        }
        for column, value in columns.items():
            cell = float(row[column]) if isinstance(value, float) else row[column]
            findings += compare("document-rows", f"{name}: {column}", cell, value, _TOLERANCE)
    return findings[:1]


def _expected_summary(
    subject: StepUnderTest, session: TrainingSession, windows: Sequence[_Window]
) -> dict[str, Any]:
    """Return the figures of summary.json, which tables read."""
    traced, small = subject.traced_run, subject.small
    nats = [loss for window in windows for loss in window.nats]
    hits = np.array([hit for window in windows for hit in window.hits], dtype=float)
    confidence = np.array([value for window in windows for value in window.confidence])
    bins = np.ceil(confidence * _BINS).astype(int) - 1
    gaps = np.bincount(bins, hits - confidence, minlength=_BINS)
    loss, tokens = math.fsum(nats) / len(nats), len(nats)
    text_bytes = sum(window.bytes for window in windows)
    shares = np.unique(subject.context.train_tokens, return_counts=True)[1]
    shares = shares / shares.sum()
    prunable = prunable_rows(subject) if session.config.pruning.name != "none" else {}
    zeros = {n: session.weights()[n][:rows] == 0 for n, rows in prunable.items()}
    weights = sum(zero.numel() for zero in zeros.values())
    return {
        "schema_version": _SCHEMA,
        "seed": session.config.seed,
        "val_loss": loss,
        "val_perplexity": math.exp(loss),
        "bits_per_byte": math.fsum(nats) / text_bytes / math.log(2),
        "token_accuracy": float(hits.mean()),
        "eval_tokens": tokens,
        "eval_documents": len({window.number for window in windows}),
        "expected_calibration_error": float(abs(gaps).sum() / tokens),
        # The last tenth of the iterations, at least one.
        "train_loss": traced.losses[-1],
        "iterations": len(traced.losses),
        "tokens": len(traced.losses) * small.train.global_batch * small.model.shape.block_size,
        "unigram_entropy": -float((shares * np.log(shares)).sum()),
        # Of the model before a frozen base is stored as codes.
        "parameters": sum(parameter.numel() for parameter in GPT(small.model).parameters()),
        "sparsity": sum(int(zero.sum()) for zero in zeros.values()) / max(1, weights),
        "sparsity_by_layer": {n: zero.double().mean().item() for n, zero in zeros.items()},
        "data_order_digest": session.order.state_dict(),
    }


def _summary(record: RunRecord, expected: Mapping[str, Any], tokens: int) -> list[CheckFinding]:
    """Compare the figures of summary.json, and the last row of the metrics."""
    actual = record.summary.value(dict, "final")
    actual |= {name: record.summary.value(int, name) for name in ("schema_version", "seed")}
    findings = []
    for name, value in expected.items():
        what, tolerance = f"in summary.json {name}", 10 * _TOLERANCE
        if name == "expected_calibration_error":
            # A difference of probabilities in fp32, which may be much smaller than they are.
            tolerance += _ROUNDING / max(value, _ROUNDING)
        findings += compare("final-result", what, actual[name], value, tolerance)
    total = math.fsum(row.nll_sum for row in record.documents) / tokens
    losses = {"results table": record.final.val_loss, "evaluation": record.eval_rows[-1].val_loss}
    for where, loss in losses.items():
        what = f"as in per_query.csv a loss of the last {where} of"
        findings += compare("exact-sum", what, loss, total)
    return findings
