"""Inputs of every step of the trial: sequences, learning rate, gradients and precision.

B micro-batch, T tokens.
"""

import itertools
import math
from unittest import mock

import torch

from gpt2.check.finding import Finding
from gpt2.check.trial import Trial
from gpt2.data.sampler import TrainSampler
from gpt2.training.session import Session
from lib.machine.group import Group
from lib.machine.process import Process
from lib.optim.schedule import ScheduleOptions

# fp32 sums in a different order.
_TOLERANCE = 1e-4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS = 2


def given(trial: Trial) -> list[Finding]:
    """Check the inputs of the trial's steps, against independent formulas if possible."""
    session = trial.rehearsal.session
    return _updates(trial, session) + _precision(trial) + _sequences(session)


def rate(options: ScheduleOptions, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    ``steps`` is the budget in iterations.
    """
    peak, low, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    x = (step - warmup) / (steps - warmup)
    match options.kind:
        case "constant":
            return peak
        case "linear":
            return low * x + peak * (1 - x)
        case "cosine":
            return low + (peak - low) * math.cos(math.pi * x / 2) ** 2
        case "wsd":
            return low + (peak - low) * min(1.0, (1 - x) / options.wsd_decay_fraction)
    raise ValueError(f"unknown schedule {options.kind!r}")


def _updates(trial: Trial, session: Session) -> list[Finding]:
    """Check the learning rate of the schedule, and the clipped gradient norm."""
    clip = trial.config.train.grad_clip or math.inf
    for i, update in enumerate(trial.updates):
        expected = rate(trial.config.schedule, i, session.budget.iterations)
        if not math.isclose(update.lr, expected, rel_tol=1e-9):
            text = f"a learning rate of {expected:g} at step {i + 1}"
            return [Finding("learning-rate", text, f"{update.lr:g}")]
        norm, expected = update.clipped_norm.item(), min(clip, update.gradient_norm.item())
        if not math.isclose(norm, expected, rel_tol=_TOLERANCE):
            text = f"gradients of norm {expected:g} for the optimizer at step {i + 1}"
            return [Finding("gradient-clipping", text, f"{norm:g}")]
    return []


def _precision(trial: Trial) -> list[Finding]:
    """Check that products of the forward pass use the configured type."""
    expected = _DTYPES[trial.config.machine.precision]
    if trial.product_dtypes == {expected}:
        return []
    dtypes = ", ".join(str(dtype) for dtype in trial.product_dtypes)
    return [Finding("precision", f"products of the forward pass in {expected}", dtypes)]


def _sequences(session: Session) -> list[Finding]:
    """Check that steps read the run's sequences in order, once each, on one rank or two."""
    size, train = session.config.model.shape.block_size, session.config.train
    sampler = TrainSampler(session.dataset.train, size, session.config.seed)
    steps = {}
    for ranks in (1, 2):
        read = []
        for rank in range(ranks):
            with mock.patch.object(session, "group", Group(Process(rank, ranks))):
                steps_of_rank = list(itertools.islice(session.batches(), _STEPS))
            read.append([torch.cat([x_BT for x_BT, _ in step]) for step in steps_of_rank])
        steps[ranks] = [torch.cat(parts) for parts in zip(*read, strict=True)]
    if torch.equal(*steps[1]):
        return [Finding("new-sequences", "new tokens in every step", "equal tokens in two steps")]
    first = session.iteration * train.global_batch
    expected_BT = torch.from_numpy(sampler.sequences(first, _STEPS * train.global_batch))[:, :-1]
    for ranks, read_BT in steps.items():
        if not torch.equal(torch.cat(read_BT), expected_BT):
            text = f"sequences {first} to {first + len(expected_BT)} in {_STEPS} steps of {ranks}"
            expected = f"{text} process(es)"
            return [Finding("data-order", expected, "other sequences or another order")]
    return []
