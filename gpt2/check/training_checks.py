"""Inputs of every step of the traced run: sequences, learning rate, gradients and precision.

B micro-batch, T tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpt2.check.cases import CheckFinding
from gpt2.check.short_run import (
    GRADIENT_STEPS,
    TRACED_PARAMETERS,
    ShortRun,
    TracedRun,
    first_elements,
)
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.data.sampler import TrainSampler
from gpt2.training.session import TrainingSession
from lib.config.field import SymbolValue
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.optim.options import AdamwpruneOptions
from lib.optim.schedule import ScheduleOptions
from lib.pruning.options import PruningOptions
from lib.pruning.pruners import NeverPruned

# fp32 sums in a different order.
_TOLERANCE = 1e-4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS = 2


def check_step_inputs(traced: TracedRun) -> list[CheckFinding]:
    """Check the inputs of the traced run's steps, against independent formulas if possible."""
    session = traced.run.session
    return _updates(traced, session) + _precision(traced) + _sequences(session)


def reference_learning_rate(options: ScheduleOptions, step: int, steps: int) -> float:
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
    size, train = session.config.model.shape.block_size, session.config.train
    sampler = TrainSampler(session.dataset.train, size, session.config.seed)
    steps = {}
    for ranks in (1, 2):
        read = []
        for rank in range(ranks):
            with mock.patch.object(session, "group", ProcessGroup(ProcessRank(rank, ranks))):
                steps_of_rank = list(itertools.islice(session.batches(), _STEPS))
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
# Rows and lengths of consecutive batches.
_SHAPES = ((3, 9), (1, 17), (2, 5))
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


# The trainer's updates against the optimizer's formulas, in float64, element by element.


# Tolerance relative to a tensor's total change, and to its size: fp32 rounds in every step.
_CHANGE_TOLERANCE = 1e-3
_SIZE_TOLERANCE = 1e-6
# The plain optimizer from which another one has to differ.
_PLAIN = "adamw"
# Values of AdamW's symbols if the configured optimizer does not set them.
_ADAM_DEFAULTS: dict[str, SymbolValue] = {
    "ADAM_BETA1": "0.9",
    "ADAM_BETA2": "0.999",
    "ADAM_EPS": "1e-8",
}
# Fields of an optimizer's options with the same name in torch's parameter groups.
_GROUP_OPTIONS = ("eps", "momentum", "dampening", "nesterov")

Parameters = list[list[float]]


def check_optimizer_updates(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the optimizer's settings, and its updates from the traced run's gradients."""
    traced, config = subject.traced_run, subject.small
    findings = _settings(traced, config)
    if not all(name in update.gradients for update in traced.updates for name in TRACED_PARAMETERS):
        what = "a gradient in every optimizer step"
        return [*findings, CheckFinding("nonzero-gradient", what, "none for the final norm")]
    name, rule = config.optimizer.name, update_options(config)
    expected = _replayed(traced, rule)
    wrong = [
        parameter
        for parameter, values in zip(TRACED_PARAMETERS, expected, strict=True)
        if not _equal(traced, parameter, values)
    ]
    if not wrong:
        return findings
    if rule.name != _PLAIN:
        adam = {
            symbol: value for symbol, value in _ADAM_DEFAULTS.items() if not config.values[symbol]
        }
        plain = _replayed(traced, update_options(with_changes(config, OPTIMIZER=_PLAIN, **adam)))
        if all(
            _equal(traced, parameter, values)
            for parameter, values in zip(TRACED_PARAMETERS, plain, strict=True)
        ):
            text = f"the same weights as {_PLAIN} from the same gradients"
            return [*findings, CheckFinding("distinct-optimizer", f"an effect of {name}", text)]
    what = f"the updates of {name}"
    return [*findings, CheckFinding("optimizer-update", what, f"other values of {wrong[0]}")]


def update_options(config: Config) -> Any:
    """Return the options of the optimizer that updates weights: the base of AdamWPrune."""
    options = config.optimizer
    return options.base if isinstance(options, AdamwpruneOptions) else options


def _settings(traced: TracedRun, config: Config) -> list[CheckFinding]:
    """Check that parameter groups match the options, and that only matrices decay."""
    rule, session = update_options(config), traced.run.session
    options = {field.name: vars(rule)[field.name] for field in dataclasses.fields(rule)}
    expected = {name: options[name] for name in _GROUP_OPTIONS if name in options}
    if "beta1" in options:
        expected["betas"] = (options["beta1"], options["beta2"])
    findings = []
    tables = {
        id(t.weight) for t in (session.state.model.wte, session.state.model.wpe) if t is not None
    }
    for group in session.state.optimizer.param_groups:
        for name, value in expected.items():
            if group[name] != value:
                text = f"an optimizer with {name} {value}"
                findings.append(CheckFinding("optimizer-setting", text, f"{group[name]}"))
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            decays = parameter.ndim >= 2 and id(parameter) not in tables
            decay = rule.weight_decay if decays else 0.0
            if group["weight_decay"] != decay:
                text = f"a weight decay of {decay:g} for {name}"
                findings.append(CheckFinding("weight-decay", text, f"{group['weight_decay']:g}"))
    return findings


def _replayed(traced: TracedRun, rule: Any) -> Parameters:
    """Return the followed tensors after the formulas were applied to the traced run's gradients."""
    start = [first_elements(traced.initial_weights[name]) for name in TRACED_PARAMETERS]
    decays = [
        rule.weight_decay if traced.initial_weights[name].ndim >= 2 else 0.0
        for name in TRACED_PARAMETERS
    ]
    # One more element has the norm of all other gradients: an optimizer may use the global norm.
    reference = rule.reference([*start, [0.0]], [*decays, 0.0])
    for update in traced.updates:
        gradients = [first_elements(update.gradients[name]) for name in TRACED_PARAMETERS]
        rest_squared = update.gradient_norm.item() ** 2 - sum(
            g * g for flat in gradients for g in flat
        )
        reference.step([*gradients, [math.sqrt(max(0.0, rest_squared))]], update.lr)
    parameters: Parameters = reference.parameters[:-1]
    return parameters


def _equal(traced: TracedRun, name: str, expected: Sequence[float]) -> bool:
    start, end = first_elements(traced.initial_weights[name]), first_elements(
        traced.final_weights[name]
    )
    distance = max(abs(w - s) for w, s in zip(expected, start, strict=True))
    tolerance = _CHANGE_TOLERANCE * distance + _SIZE_TOLERANCE * max(abs(w) for w in expected)
    # Pruned weights are zero; all others were only updated by the optimizer.
    pruned = traced.config.pruning.name != "none"
    pairs = [(e, w) for e, w in zip(end, expected, strict=True) if not (pruned and e == 0.0)]
    return all(math.isclose(e, w, rel_tol=0.0, abs_tol=tolerance) for e, w in pairs)


# Pruner and optimizer follow the formulas of the configured algorithms.


_SPARSITY_TOLERANCE = 0.005
# Share of a tensor that may reach zero without pruning.
_MAX_ZERO_SHARE = 0.01
# Scores closer than this share of the largest are ties in fp32.
_TIE_TOLERANCE = 1e-5


def check_pruned(subject: StepUnderTest) -> list[CheckFinding]:
    """Check sparsity along the traced run's ramp, the pruned weights, and every optimizer update."""
    pruned = subject.config.pruning.name != "none"
    findings = _sparsity(subject) + _pruning_order(subject) if pruned else []
    return findings + check_optimizer_updates(subject)


def _sparsity(subject: StepUnderTest) -> list[CheckFinding]:
    traced, options = subject.traced_run, subject.config.pruning
    assert isinstance(options, PruningOptions)
    target = options.target
    unprunable = _unprunable(traced.run.session.state.model)
    # Padding rows of the vocabulary are zero from the start.
    used_rows = {"wte.weight": subject.small.model.shape.vocab_size}
    matrices = {
        name: w[: used_rows.get(name)]
        for name, w in traced.final_weights.items()
        if name not in unprunable and _prunable(subject, name, w)
    }
    size = sum(w.numel() for w in matrices.values())
    reached = sum(int((w == 0).sum()) for w in matrices.values()) / size
    findings = []
    if not target - _SPARSITY_TOLERANCE <= reached <= target + _SPARSITY_TOLERANCE:
        text = f"{reached:.1%} of the weights are zero at the end of the budget"
        findings.append(CheckFinding("target-sparsity", f"a sparsity of {target:.0%}", text))
    for name in traced.final_weights.keys() - matrices.keys():
        new_zeros = int((traced.final_weights[name] == 0).sum()) - int(
            (traced.initial_weights[name] == 0).sum()
        )
        if new_zeros > _MAX_ZERO_SHARE * traced.final_weights[name].numel():
            text = f"{new_zeros} weights became zero"
            findings.append(CheckFinding("unpruned-parameter", f"no pruning of {name}", text))
    decreases = any(b < a for a, b in itertools.pairwise(traced.sparsity))
    if decreases or traced.sparsity[0] >= target:
        steps = ", ".join(f"{s:.1%}" for s in traced.sparsity)
        findings.append(
            CheckFinding("sparsity-ramp", "a sparsity that grows along the ramp", steps)
        )
    return findings


def _unprunable(model: nn.Module) -> set[str]:
    """Return the parameters of modules that must not be pruned."""
    paths = [path for path, module in model.named_modules() if isinstance(module, NeverPruned)]
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(paths))}


def _prunable(subject: StepUnderTest, name: str, weight: Tensor) -> bool:
    embedding = name in ("wte.weight", "wpe.weight")
    options = subject.config.pruning
    assert isinstance(options, PruningOptions)
    return weight.ndim >= 2 and (options.include_embeddings or not embedding)


def _pruning_order(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that the weights of a matrix with the lowest scores are pruned at every event."""
    traced, options = subject.traced_run, subject.small.pruning
    assert isinstance(options, PruningOptions)
    reference = options.reference()
    alive = [True] * len(first_elements(traced.initial_weights[TRACED_PARAMETERS[1]]))
    for step, (inputs, mask) in enumerate(
        zip(traced.pruner_inputs, traced.remaining_masks, strict=True), 1
    ):
        scores = reference.scores(inputs)
        pruned = [s for s, was, is_ in zip(scores, alive, mask, strict=True) if was and not is_]
        remaining = [s for s, is_ in zip(scores, mask, strict=True) if is_]
        if (
            pruned
            and remaining
            and max(pruned) > min(remaining) + _TIE_TOLERANCE * max(map(abs, scores))
        ):
            text = f"step {step} prunes {max(pruned):.3g} and leaves {min(remaining):.3g}"
            expected = f"the lowest scores of {options.name} are pruned"
            return [CheckFinding("pruning-order", expected, text)]
        alive = mask
    return []


# Training twice with the same seed gives identical bits.


def check_repeat(subject: StepUnderTest) -> list[CheckFinding]:
    """Repeat the first steps of the traced run, with an evaluation between them."""
    traced, context = subject.traced_run, subject.context
    run = ShortRun(subject.small, context.prepare_data(subject.small), context.new_run_dir())
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
            # All windows in one batch take the least time.
            with mock.patch.object(run.session.evaluate, "batch_size", 8):
                run.session.evaluate(run.session.state.model)
    run.close()
    for name, weight in run.session.state.weights().items():
        if not torch.equal(weight, traced.weights_after_gradient_steps[name]):
            expected = f"the same trained {name} for the same seed"
            return [CheckFinding("same-trained-weights", expected, "other values")]
    return []
