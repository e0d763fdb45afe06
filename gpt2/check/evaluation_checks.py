"""The loss of the results table is the mean over the tokens of the configured held-out windows.

Everything is recomputed from the texts of the held-out documents, the model's logits and the values
of the symbols. B rows of a batch, T tokens, V vocabulary.
"""

import hashlib
import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from gpt2.check.finding import CheckFinding
from gpt2.check.result_checks import (
    END_OF_TEXT,
    ExpectedWindow,
    check_results,
    check_sample,
    configured_evaluator,
    finish,
    finishing_session,
    scored_documents,
)
from gpt2.check.short_run import TracedRun
from gpt2.check.subject import StepUnderTest
from gpt2.evaluate import EvaluationResult
from gpt2.loss import IGNORE_INDEX
from gpt2.model import GPT
from gpt2.training.metrics import record_statistics
from gpt2.training.session import TrainingSession

_FACTOR = 2.0


def check_evaluated(subject: StepUnderTest) -> list[CheckFinding]:
    """Evaluate the traced run twice, write its results, and recompute all of them."""
    traced = subject.traced_run
    state = traced.run.session.state
    model = state.model
    expected_windows = _windows(subject)
    finishing = finishing_session(subject)
    # One evaluator for both evaluations, which may store nothing of the first one.
    finishing = replace(finishing, evaluate=configured_evaluator(finishing))
    with ExitStack() as stack:
        findings = _side_effects(traced, finishing)
        # Other weights, so that nothing of the first evaluation may be used again. With larger
        # matrices, losses differ enough for a mean over tokens to differ from other means.
        state.load_weights(_enlarged(traced.final_weights))
        stack.callback(state.load_weights, traced.final_weights)
        record = finish(finishing, traced.losses)
        findings += check_sample(finishing)
        precision = subject.small.values["PRECISION"]
        documents, calibration_error = scored_documents(
            model, expected_windows, precision == "bf16"
        )
    return findings + (
        _selection(subject, expected_windows)
        or check_results(subject, finishing, record, documents, calibration_error)
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
        windows += _cut(f"val.jsonl:{number}", [*text.encode(), END_OF_TEXT], digest, size)
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
    """Check the windows of the run."""
    session = subject.traced_run.run.session
    # Name → position and offset of the document.
    starts: dict[str, tuple[int, int]] = {}
    offset = 0
    for number, text in enumerate(subject.context.held_out):
        starts[f"val.jsonl:{number + 1}"] = number, offset
        offset += len(text.encode()) + 1
    actual = [(w.document, w.offset, w.length) for w in session.evaluate.windows]
    expected = [
        (number, offset + w.start, len(w.tokens))
        for w in expected_windows
        for number, offset in [starts[w.document]]
    ]
    what = "held-out windows (document, offset, tokens)"
    return _different_windows(what, actual, expected)


def _different_windows(
    what: str, actual: Sequence[tuple[int, int, int]], expected: Sequence[tuple[int, int, int]]
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


def _side_effects(traced: TracedRun, session: TrainingSession) -> list[CheckFinding]:
    """Evaluate once and record statistics; check that this leaves the training unchanged."""
    state = session.state
    optimizer = cast(torch.optim.Optimizer, state.optimizer)
    before, tensors = _generators(), _optimizer_tensors(optimizer)
    evaluation = session.evaluate(state.model)
    # Recording statistics restores the mode of all modules.
    modes = [name for name, module in state.model.named_modules() if not module.training]
    record_statistics(session)
    modes += [name for name, module in state.model.named_modules() if not module.training]
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
    findings += _figures(evaluation)
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
    if actual == model.total:
        return []
    what = f"losses summed in float64: {model.total:.0f} of 2^30 and 1 by turns"
    return [CheckFinding("evaluation-sums", what, f"{actual:.0f}")]


def _figures(evaluation: EvaluationResult | None) -> list[CheckFinding]:
    """Check loss and accuracy of an evaluation against the rows of its documents."""
    if evaluation is None:
        return [CheckFinding("evaluation-figures", "an evaluation", "none")]
    documents = evaluation.documents
    sums = [document.nll_sum for document in documents]
    tokens = sum(document.n_tokens for document in documents)
    expected = sum(sums) / tokens, sum(document.n_correct for document in documents) / tokens
    actual = evaluation.loss, evaluation.accuracy
    if all(map(math.isclose, actual, expected)):
        return []
    what, figures = "loss and accuracy of an evaluation: {:.6g} and {:.6g}", "{:.6g} and {:.6g}"
    return [
        CheckFinding("evaluation-figures", what.format(*expected), figures.format(*actual)),
    ]
