"""The loss of the results table is the mean over the tokens of the configured held-out windows.

Everything is recomputed from the texts of the held-out documents, the model's logits and the values
of the symbols. B rows of a batch, T tokens, V vocabulary.
"""

import csv
import hashlib
import itertools
import math
import pickle
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gpt2 import train
from gpt2.check.cases import CheckFinding
from gpt2.check.pairing_checks import stream_key
from gpt2.check.short_run import TracedRun, in_batches_of
from gpt2.check.subject import StepUnderTest
from gpt2.data.store import TokenSplit, evaluation_windows
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.evaluate import EvaluationResult, Evaluator
from gpt2.generate import SamplingOptions, generate
from gpt2.model import GPT
from gpt2.training.finish import generate_sample
from gpt2.training.metrics import check_first_steps
from gpt2.training.records import RecordWriter
from gpt2.training.session import TrainingSession
from lib.runs.record import EvalRow, RunRecord
from lib.runs.run_dir import RunDir

# Rows of a batch: the last batch of five windows has fewer.
_BATCH = 2
_END_OF_TEXT = 256
# Log-probabilities in fp32 against float64.
_TOLERANCE = 1e-6
_BINS = 15
_FACTOR = 2.0
# A prompt of other bytes than characters, and the tokens of a sample.
_PROMPT, _SAMPLED = "Hä", 3


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


def check_evaluated(subject: StepUnderTest) -> list[CheckFinding]:
    """Evaluate the traced run twice, write its results, and recompute all of them."""
    traced = subject.traced_run
    state = traced.run.session.state
    model = state.model
    expected_windows = _windows(subject)
    finishing = _finishing(subject)
    with ExitStack() as stack:
        findings = _side_effects(traced, finishing.evaluate)
        finishing.evaluate.batch_size = _BATCH
        # Other weights, so that nothing of the first evaluation may be used again. With larger
        # matrices, losses differ enough for a mean over tokens to differ from other means.
        state.load_weights(_enlarged(traced.final_weights))
        stack.callback(state.load_weights, traced.final_weights)
        record = _finish(finishing, traced.losses)
        findings += [*_sample(finishing), *_health(finishing, record, traced.losses)]
        precision = subject.small.values["PRECISION"]
        documents, calibration_error = _evaluate(model, expected_windows, precision == "bf16")
    return findings + (
        _selection(subject, expected_windows)
        or _rows(subject, record, documents)
        or _summary(subject, record, documents, calibration_error)
        or _table(subject, record)
    )


class _SpelledEnd(ByteTokenizer):
    """Bytes with a spelled end of text, as GPT-2's tokenizer has it: it is no byte of the text."""

    def token_bytes(self, token: int) -> bytes:
        """Return the byte, or the name of the end-of-text token."""
        return super().token_bytes(token) or b"<|endoftext|>"


def _finishing(subject: StepUnderTest) -> TrainingSession:
    """Return the traced session with a separate folder, a sample and a health check."""
    session = subject.traced_run.run.session
    settings: dict[str, Any] = {
        "sample_tokens": _SAMPLED,
        "sample_prompt": _PROMPT,
        "first_steps": session.state.iteration - 1,
    }
    files = RunDir(subject.context.new_run_dir())
    return replace(
        session,
        run=files,
        records=RecordWriter(files, lambda event: None),
        config=replace(session.config, train=replace(session.config.train, **settings)),
        tokenizer=_SpelledEnd(),
        evaluate=in_batches_of(len(session.evaluate.windows), session.evaluate),
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


def _side_effects(traced: TracedRun, evaluate: Evaluator) -> list[CheckFinding]:
    """Evaluate once, and check that the evaluation leaves everything of the training unchanged."""
    state = traced.run.session.state
    optimizer = cast(torch.optim.Optimizer, state.optimizer)
    before, tensors = _generators(), _optimizer_tensors(optimizer)
    evaluation = evaluate(state.model)
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


def _finish(session: TrainingSession, losses: Sequence[float]) -> RunRecord:
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
        train.record_results(session, evaluation, time.monotonic())
    session.records.close()
    return RunRecord(session.run)


def _sample(session: TrainingSession) -> list[CheckFinding]:
    """Check the text after a prompt, and after none: bytes, number of tokens and random stream."""
    config, texts = session.config, {_PROMPT: session.run.sample.read_text(encoding="utf-8")}
    unprompted = replace(config, train=replace(config.train, sample_prompt=""))
    texts[""] = generate_sample(replace(session, config=unprompted))
    plain = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    for prompt, text in texts.items():
        ids = torch.tensor(list(prompt.encode()) or [_END_OF_TEXT])
        key = stream_key(config.seed, "sample")
        tokens = generate(session.state.model, ids, key, config.machine, plain)
        drawn = bytes(t for t in itertools.islice(tokens, _SAMPLED) if t != _END_OF_TEXT)
        expected = f"{prompt}{drawn.decode(errors='replace')}\n"
        if text != expected:
            what = f"the sample {expected!r} of {_SAMPLED} tokens after {prompt!r}"
            return [CheckFinding("text-sample", what, repr(text))]
    return []


def _health(
    session: TrainingSession, record: RunRecord, losses: Sequence[float]
) -> list[CheckFinding]:
    """Check the verdict on the first steps: all but the last one, all, too many, and none."""
    uniform, steps = math.log(session.config.model.shape.vocab_size), len(losses)
    falls = [losses[n - 1] < min(losses[0], uniform) for n in (steps - 1, steps)]
    expected: list[Any] = [(steps - 1, falls[0], True), (steps, falls[1], False), None, None]
    found: list[Any] = []
    for first_steps in (steps - 1, steps, steps + 1, 0):
        train_config = replace(session.config.train, first_steps=first_steps)
        config = replace(session.config, train=train_config)
        verdict = check_first_steps(replace(session, config=config))
        if verdict is None:
            found.append(None)
        else:
            parts = (verdict.found[name][0] for name in ("loss", "gradients"))
            found.append((verdict.steps, *parts))
    recorded = record.summary.value(dict, "timing")["first_steps"]
    if found == expected and recorded["steps"] == steps - 1:
        return []
    what = f"(steps, loss falls, gradients) of a health check: {expected}"
    return [CheckFinding("health-check", what, f"{found}, {recorded['steps']} in summary.json")]


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
        for row, (window, probabilities_TV) in enumerate(
            zip(batch, probabilities_BTV, strict=True)
        ):
            targets = window.tokens[1:]
            new = ExpectedDocument(place=(first // _BATCH, row))
            document = documents.setdefault(window.document, new)
            document.parts[window.start] = targets
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


# Variants of a table: parent, losses of two seeds, and their differences from baseline and parent.
_VARIANTS: Mapping[str, tuple[str, Mapping[str, Sequence[float]]]] = {
    "baseline": ("", {"val_loss": (3.0, 3.5), "delta_baseline": (), "delta_parent": ()}),
    "parent": (
        "baseline",
        {
            "val_loss": (2.75, 3.375),
            "delta_baseline": (-0.25, -0.125),
            "delta_parent": (-0.25, -0.125),
        },
    ),
    "step": (
        "parent",
        {
            "val_loss": (2.5, 3.0625),
            "delta_baseline": (-0.5, -0.4375),
            "delta_parent": (-0.25, -0.3125),
        },
    ),
}


def _table(subject: StepUnderTest, record: RunRecord) -> list[CheckFinding]:
    """Check means and paired differences in table.csv, once for all steps."""
    if next(iter(subject.study_cases), subject.case.slug) != subject.case.slug:
        return []
    # Imported here: only the first step needs them.
    from lib.plan.run import PlannedRun, RunVariant
    from lib.report.run_facts import RunFacts
    from lib.report.table import ComparableGroup, ResultTable, RunResult, variant_rows
    from lib.report.table_text import table_to_csv
    from lib.report.verdicts import SeedOutcome

    facts, summary = RunFacts(record, {}, {}, {}, {}, {}), record.summary
    variants, results = [], []
    for slug, (parent, figures) in _VARIANTS.items():
        variants.append(RunVariant(slug, parent=parent))
        losses = dict(enumerate(figures["val_loss"], 1))
        # Seeds in another order than those of the other variants.
        for seed in sorted(losses, reverse=slug == "parent"):
            run = PlannedRun("check", variants[-1], seed, subject.config, record.run.path)
            final, outcome = replace(summary.final, val_loss=losses[seed]), SeedOutcome(seed, 0.0)
            results.append(RunResult(run, facts, final, summary.timing, {}, outcome))
    rows = variant_rows(ComparableGroup({}, results), variants, "baseline", ())
    table = csv.DictReader(table_to_csv(ResultTable("check", rows, None, ())).splitlines())
    for row in table:
        for column, values in _VARIANTS[row["slug"]][1].items():
            numbers = (statistics.fmean(values), statistics.stdev(values)) if values else ("", "")
            expected = [str(number) for number in numbers]
            if (actual := [row[column], row[f"{column}_sd"]]) != expected:
                what = f"mean and standard deviation of {column} of {row['slug']}: {expected}"
                return [CheckFinding("table-figures", what, f"{actual}")]
    return []
