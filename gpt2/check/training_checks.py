"""Inputs of every step of the traced run: sequences, learning rate, gradients and precision.

B micro-batch, T tokens.
"""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.check.cases import CheckFinding
from gpt2.check.short_run import GRADIENT_STEPS, ShortRun, TracedRun, in_batches_of
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.data.sampler import TrainSampler
from gpt2.training.session import TrainingSession
from gpt2.training.setup import warm_up
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.optim.schedule import ScheduleOptions

# fp32 sums in a different order.
_TOLERANCE = 1e-4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS = 2


def check_step_inputs(traced: TracedRun) -> list[CheckFinding]:
    """Check the inputs of the traced run's steps, against independent formulas if possible."""
    session = traced.run.session
    return _updates(traced, session) + _precision(traced) + _sequences(session)


def reference_learning_rate(options: ScheduleOptions, step: float, steps: int) -> float:
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


def _updates(traced: TracedRun, session: TrainingSession) -> list[CheckFinding]:
    """Check the learning rate of the schedule, and the clipped gradient norm."""
    clip = traced.config.train.grad_clip or math.inf
    for i, update in enumerate(traced.updates):
        expected = reference_learning_rate(
            traced.config.schedule, i, session.state.budget.iterations
        )
        if not math.isclose(update.lr, expected, rel_tol=1e-9):
            text = f"a learning rate of {expected:g} at step {i + 1}"
            return [CheckFinding("learning-rate", text, f"{update.lr:g}")]
        norm, expected = update.clipped_norm.item(), min(clip, update.gradient_norm.item())
        if not math.isclose(norm, expected, rel_tol=_TOLERANCE):
            text = f"gradients of norm {expected:g} for the optimizer at step {i + 1}"
            return [CheckFinding("gradient-clipping", text, f"{norm:g}")]
    return []


def _precision(traced: TracedRun) -> list[CheckFinding]:
    """Check that products of the forward pass use the configured type."""
    expected = _DTYPES[traced.config.machine.precision]
    if traced.product_dtypes == {expected}:
        return []
    dtypes = ", ".join(str(dtype) for dtype in traced.product_dtypes)
    return [CheckFinding("precision", f"products of the forward pass in {expected}", dtypes)]


def _sequences(session: TrainingSession) -> list[CheckFinding]:
    """Check that steps read the run's sequences in order, once each, on one rank or two."""
    small = session.config.train
    # Four micro-batches: with one per rank, the parts of ranks and micro-batches coincide.
    train = replace(small, global_batch=4, batch_size=1, grad_accumulation=4)
    config = replace(session.config, train=train)
    sampler = TrainSampler(session.dataset.train, config.model.shape.block_size, config.seed)
    steps = {}
    for ranks in (1, 2):
        read = []
        for rank in range(ranks):
            one = replace(session, config=config, group=ProcessGroup(ProcessRank(rank, ranks)))
            steps_of_rank = list(itertools.islice(one.batches(), _STEPS))
            read.append([torch.cat([x_BT for x_BT, _ in step]) for step in steps_of_rank])
        steps[ranks] = [torch.cat(parts) for parts in zip(*read, strict=True)]
    if torch.equal(*steps[1]):
        return [
            CheckFinding("new-sequences", "new tokens in every step", "equal tokens in two steps")
        ]
    first = session.state.iteration * train.global_batch
    expected_BT = torch.from_numpy(sampler.sequences(first, _STEPS * train.global_batch))[:, :-1]
    for ranks, read_BT in steps.items():
        if not torch.equal(torch.cat(read_BT), expected_BT):
            text = f"sequences {first} to {first + len(expected_BT)} in {_STEPS} steps of {ranks}"
            expected = f"{text} process(es)"
            return [CheckFinding("data-order", expected, "other sequences or another order")]
    return []


# Training works: several steps, gradient accumulation, other batch shapes, a falling loss.
#
# B micro-batch, T tokens.


_REPEATED = 3
# An interval longer than any of these runs.
_NEVER = 1000
# Rows and lengths of consecutive batches after one of 2 x 40: each number grows and shrinks once.
_SHAPES = ((3, 9), (1, 17))
# fp32 sums in a different order.
_STEPS_TOLERANCE = 1e-4


def check_steps(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the traced run's losses, a repeated batch from the start, and other batch shapes."""
    losses = {f"step {i}": loss for i, loss in enumerate(subject.traced_run.losses, 1)}
    context, small = subject.context, subject.small_exact
    if small.pruning.name != "none":
        # Training cannot compensate the large prunings of a ramp of few iterations.
        small = with_changes(small, PRUNING_FREQUENCY=_NEVER)
    run = ShortRun(small, context.prepare_data(small), context.new_run_dir())
    findings, repeated = _repeat(subject, run)
    losses |= {f"repeated batch, step {i}": loss for i, loss in enumerate(repeated, 1)}
    with subject.chunked(run.session.state.model):
        for rows, length in _SHAPES:
            ids_BT = subject.tokens(rows, length)
            loss = run.step([(ids_BT[:, :-1], ids_BT[:, 1:])])
            losses[f"a batch of {rows} x {length - 1}"] = loss
    run.close()
    findings += [
        CheckFinding("finite-loss", "a finite loss", f"{loss} at {location}")
        for location, loss in losses.items()
        if not math.isfinite(loss)
    ]
    return findings + check_step_inputs(subject.traced_run)


def _repeat(subject: StepUnderTest, run: ShortRun) -> tuple[list[CheckFinding], list[float]]:
    """Train on one batch, alternating between one piece and two micro-batches.

    Checks that the losses fall, and that loss and gradient norm of the second step are those of the
    whole batch. Returns the findings and the losses.
    """
    ids_BT = subject.tokens(2)
    x_BT, y_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    halves = list(zip(x_BT.split(1), y_BT.split(1), strict=True))
    findings, losses = [], []
    for i in range(_REPEATED):
        if i == 1:
            expected = _whole_batch(run.session, x_BT, y_BT)
        losses.append(run.step(halves if i % 2 else [(x_BT, y_BT)]))
        if i == 1:
            pairs = zip(
                ("loss", "gradient norm"), (losses[1], run.gradient_norm), expected, strict=True
            )
            findings += [
                CheckFinding(
                    "accumulation",
                    f"the {what} of the whole batch ({whole}) from two micro-batches",
                    f"{actual}",
                )
                for what, actual, whole in pairs
                if abs(actual - whole) > _STEPS_TOLERANCE * abs(whole)
            ]
    if not losses[-1] < losses[0]:
        text = f"{losses[0]:.4f}, then {losses[-1]:.4f} after {_REPEATED} steps"
        findings.append(CheckFinding("falling-loss", "a falling loss on a repeated batch", text))
    return findings, losses


def _whole_batch(session: TrainingSession, x_BT: Tensor, y_BT: Tensor) -> tuple[float, float]:
    """Return loss and gradient norm at the session's weights, without accumulation."""
    loss = session.state.model(x_BT, y_BT)
    loss.backward()
    session.state.pruner.mask_gradients()
    gradients = [p.grad for p in session.state.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    session.state.optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()


# Training twice with the same seed gives identical bits.


def check_repeat(subject: StepUnderTest) -> list[CheckFinding]:
    """Repeat the first steps of the traced run after warm-up steps, with an evaluation between."""
    traced, context = subject.traced_run, subject.context
    config = with_changes(subject.small, WARMUP_ITERATIONS=1)
    run = ShortRun(config, context.prepare_data(subject.small), context.new_run_dir())
    warm_up(run.session)
    for name, weight in run.session.state.weights().items():
        if not torch.equal(weight, traced.initial_weights[name]):
            expected = f"the same initial {name} for the same seed"
            return [CheckFinding("same-initial-weights", expected, "other values")]
    for i in range(GRADIENT_STEPS):
        loss = run.step()
        if loss != traced.losses[i]:
            text = f"{traced.losses[i]!r}, then {loss!r}" + (", after an evaluation" if i else "")
            expected = f"the same loss at step {i + 1} for the same seed"
            return [CheckFinding("same-loss", expected, text)]
        if i == 0:
            in_batches_of(8, run.session.evaluate)(run.session.state.model)
    run.close()
    for name, weight in run.session.state.weights().items():
        if not torch.equal(weight, traced.weights_after_gradient_steps[name]):
            expected = f"the same trained {name} for the same seed"
            return [CheckFinding("same-trained-weights", expected, "other values")]
    return []
