"""What every step of the trial is given: its sequences, rate, gradients and precision.

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

# fp32 sums in another order.
_TOLERANCE = 1e-4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS = 2


def given(trial: Trial) -> list[Finding]:
    """By formulas of their own where there are any."""
    session = trial.rehearsal.session
    return _updates(trial, session) + _precision(trial) + _sequences(session)


def rate(options: ScheduleOptions, step: int, steps: int) -> float:
    """Of optimizer step ``step``, from 0, of a budget of ``steps`` iterations."""
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
    """The schedule's learning rate, and gradients that are clipped."""
    clip = trial.config.train.grad_clip or math.inf
    for i, update in enumerate(trial.updates):
        wanted = rate(trial.config.schedule, i, session.budget.iterations)
        if not math.isclose(update.lr, wanted, rel_tol=1e-9):
            return [Finding(f"a learning rate of {wanted:g} at step {i + 1}", f"{update.lr:g}")]
        norm, wanted = update.clipped_norm.item(), min(clip, update.gradient_norm.item())
        if not math.isclose(norm, wanted, rel_tol=_TOLERANCE):
            what = f"gradients of norm {wanted:g} for the optimizer at step {i + 1}"
            return [Finding(what, f"{norm:g}")]
    return []


def _precision(trial: Trial) -> list[Finding]:
    """Products of the forward pass are in the configured type."""
    wanted = _DTYPES[trial.config.machine.precision]
    if trial.product_dtypes == {wanted}:
        return []
    found = ", ".join(str(dtype) for dtype in trial.product_dtypes)
    return [Finding(f"products of the forward pass in {wanted}", found)]


def _sequences(session: Session) -> list[Finding]:
    """Each step reads the next sequences of the run, each of them once, in one process or two."""
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
        return [Finding("other tokens in every step", "two steps read the same")]
    first = session.iteration * train.global_batch
    wanted_BT = torch.from_numpy(sampler.sequences(first, _STEPS * train.global_batch))[:, :-1]
    for ranks, read_BT in steps.items():
        if not torch.equal(torch.cat(read_BT), wanted_BT):
            what = f"sequences {first} to {first + len(wanted_BT)} in {_STEPS} steps of {ranks}"
            return [Finding(f"{what} process(es)", "other ones, or in another order")]
    return []
