"""Checks of what a step computes: causality, isolation, gradients, the reference, initialization.

B batch, T tokens, V vocabulary.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.attention import reference as attention_reference
from gpt2.attention.options import PartOptions
from gpt2.attention.projections import ZeroInitLinear
from gpt2.check.finding import CheckFinding, expect, within
from gpt2.check.short_run import GRADIENT_STEPS
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest, relative_error
from gpt2.loss import IGNORE_INDEX, LogitsChunks
from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from lib.config.field import SymbolValue
from lib.optim.optimizers import trainable_parameters

_CAUSAL_TOLERANCE = 1e-12


def check_causal(subject: StepUnderTest) -> list[CheckFinding]:
    """Check in float64 that logits depend on no later token, other row or earlier call."""
    with subject.chunked():
        # First, so that a value kept from a call is that of other tokens.
        findings = _by_other_inputs(subject)
        return findings + [*_by_change(subject)][:1] + [*_by_gradient(subject)][:1]


def _positions(idx_BT: Tensor) -> list[int]:
    """Return the second position, two in the middle, and the last one."""
    length = idx_BT.size(1)
    return sorted({1, length // 3, length // 2 + 1, length - 1})


def _by_change(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Change another token in each row of a batch."""
    positions = _positions(subject.tokens(1))
    idx_BT = subject.tokens(1).repeat(len(positions), 1)
    changed_BT = idx_BT.clone()
    for row, t in enumerate(positions):
        changed_BT[row, t] = (idx_BT[row, t] + 101) % 256
    data_dependent = subject.config.model.attention.pattern.data_dependent
    with torch.no_grad():
        change_BT = (subject.model(changed_BT) - subject.model(idx_BT)).abs().amax(-1)
    for t, change_T in zip(positions, change_BT, strict=True):
        leaks = (change_T[:t] > (_CAUSAL_TOLERANCE if data_dependent else 0.0)).nonzero()
        if len(leaks):
            found = f"logits at {int(leaks[0])} change by {float(change_T[:t].max()):.1e}"
            yield CheckFinding("causal-logits", f"token {t} changes no logits before {t}", found)
        expected = f"token {t} changes logits from {t} on"
        yield from expect(bool(change_T[t:].any()), "token-affects-logits", expected, "no change")


def _by_gradient(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check that ∂ logits at t / ∂ embedding at s is 0 for s > t; each row tests another t."""
    positions = _positions(subject.tokens(1))[:-1]
    idx_BT = subject.tokens(1).expand(len(positions), -1)
    embedded: list[Tensor] = []
    # A frozen embedding requires no gradient.
    hook = subject.model.wte.register_forward_hook(
        lambda part, given, out: embedded.append(out.requires_grad_())
    )
    logits_BTV = subject.model(idx_BT)
    hook.remove()
    selected = torch.stack([logits_BTV[b, t] for b, t in enumerate(positions)])
    (gradient_BTC,) = torch.autograd.grad(selected.square().sum(), embedded[:1])
    for t, size_T in zip(positions, gradient_BTC.abs().amax(-1), strict=True):
        if len(later := size_T[t + 1 :].nonzero()):
            expected = f"logits at {t} do not depend on token {t + 1 + int(later[0])}"
            found = f"a gradient of {float(size_T[t + 1 :].max()):.1e}"
            yield CheckFinding("causal-gradient", expected, found)


def _by_other_inputs(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that a row depends neither on the others nor on earlier calls, in any place."""
    model, idx_BT = subject.model, subject.tokens(3)
    changed_BT = idx_BT.clone()
    changed_BT[1] = idx_BT[1].flip(0)
    with torch.no_grad():
        before, after = model(idx_BT), model(changed_BT)
        moved = model(changed_BT.roll(1, 0)).roll(-1, 0)
    same, expected = torch.equal(before[::2], after[::2]), "rows 0 and 2 do not depend on row 1"
    findings = expect(same, "independent-rows", f"{expected} of the batch", "other logits")
    expected, error = "the same logits in another call and place", relative_error(moved, after)
    return findings + within("stateless-call", expected, error, _CAUSAL_TOLERANCE)


# Every parameter learns: its gradient is finite and nonzero, and the optimizer updates it.


# Steps of a difference in float64, and its relative error. A weight that crosses a threshold within the
# first step makes a difference that is no derivative.
_DIFFERENCES = (1e-6, 1e-7, 1e-8)
_DERIVATIVE_TOLERANCE = 1e-5
# The smallest sum of gradient norms with which a parameter has to move.
_LEAST_MOVING = 1e-10


def check_gradients(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check gradients from the initialization and from filled parameters, and the optimizer."""
    traced = subject.traced_run
    optimizer = traced.session.optimizer
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    # The step of SGD scales with the gradient and may be below the fp32 resolution of a weight. So does
    # that of others, once the gradient is far below their epsilon.
    always_moves = subject.config.optimizer.name != "sgd"
    filled = {key.split()[0]: norm for key, (_, norm) in subject.fingerprint.gradients.items()}
    steps = f"in {GRADIENT_STEPS} optimizer steps from the initialization"
    for name, parameter in trainable_parameters(traced.session.model).items():
        norm, trained = filled.get(name, 0.0), traced.gradient_sums[name]
        finite, learns = math.isfinite(norm + trained), norm != 0.0 and trained != 0.0
        yield from expect(finite, "finite-gradient", f"a finite gradient of {name}", "NaN or inf")
        where = f"none or zero, {'although no parameter is zero' if norm == 0.0 else steps}"
        yield from expect(learns, "nonzero-gradient", f"a gradient of {name}", where)
        moved = traced.weights_after_gradient_steps[name], traced.initial_weights[name]
        moves = always_moves and trained > _LEAST_MOVING
        if finite and learns and moves and torch.equal(*moved):
            yield CheckFinding(
                "moving-parameter", f"the optimizer updates {name}", f"no change {steps}"
            )
        groups, expected = grouped.count(id(parameter)), f"{name} in one parameter group"
        yield from expect(groups == 1, "optimizer-groups", expected, f"in {groups}")
    yield from _with_dropout(subject)


def _with_dropout(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check that backward uses the masks of forward: gradients in float64 against differences.

    Checked is the derivative along a random direction, once with stored and once with recomputed
    blocks. A mechanism that detaches a value has another gradient by design.
    """
    options = [
        pair for part in _components(subject.small_exact.model) for pair in vars(part).items()
    ]
    detaches = any(value for name, value in options if name.startswith("detach"))
    if detaches or (model := subject.dropping) is None:
        return
    idx_BT, parameters = subject.tokens(1), list(trainable_parameters(model.train()).values())
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    before = [p.detach().clone() for p in parameters]

    def loss() -> Tensor:
        with torch.random.fork_rng([]), subject.chunked(model):
            torch.manual_seed(0)
            value: Tensor = model(idx_BT[:, :-1], idx_BT[:, 1:])
            if value.requires_grad:
                value.backward()
        return value

    @cache
    @torch.no_grad()
    def difference(step: float) -> float:
        losses = []
        for factor in (step, -step, 0.0):
            for parameter, start, v in zip(parameters, before, directions, strict=True):
                parameter.copy_(start + factor * v)
            # The last one is that of the weights themselves, which remain.
            losses += [float(loss())] if factor else []
        return (losses[0] - losses[1]) / (2 * step)

    for how in ("stored", "recomputed"):
        model.grad_checkpointing = how == "recomputed"
        loss()
        pairs = [(p.grad, v) for p, v in zip(parameters, directions, strict=True)]
        derivative = sum(float((grad * v).sum()) for grad, v in pairs if grad is not None)
        model.zero_grad(set_to_none=True)
        equal = any(
            abs(d - derivative) <= _DERIVATIVE_TOLERANCE * abs(d)
            for d in map(difference, _DIFFERENCES)
        )
        expected = "a gradient with the dropout masks of the forward pass"
        found = f"another derivative, {how} blocks"
        yield from expect(equal, "dropout-gradient", expected, found)
    model.grad_checkpointing = False


# Matrices start as in GPT-2, and vectors of a mechanism as its options configure.


# Elements that determine a standard deviation to 3 %, and the relative tolerance.
_MIN_ELEMENTS = 500
_STD_TOLERANCE = 0.15
# Vectors without an option: weights of norms, and factors, which start as the identity.
_STARTS = {"weight": 1.0, "factors": 1.0}


def _matrices(model: GPT, config: ModelConfig) -> Iterator[CheckFinding]:
    """Check the standard deviation of initial matrices: GPT-2's, and 0 where a branch is added."""
    zero = [f"{path}.weight" for path, m in model.named_modules() if isinstance(m, ZeroInitLinear)]
    # Training of adapters starts from the function of the base.
    zero += [name for name, _ in model.named_parameters() if name.endswith(".adapter.up.weight")]
    for name, parameter in model.named_parameters():
        rows = config.shape.vocab_size if name in ("wte.weight", "lm_head.weight") else None
        weights = parameter.detach()[:rows]
        std = 0.02 / math.sqrt(2 * config.shape.n_layer if name.endswith("c_proj.weight") else 1)
        if name in zero:
            expected = f"0 in the initial {name}"
            yield from expect(not weights.any(), "initial-zero", expected, "nonzero values")
        elif weights.ndim >= 2 and weights.numel() >= _MIN_ELEMENTS:
            expected = f"a standard deviation of {std:.4f} of the initial {name}"
            near = abs(float(weights.std()) / std - 1) <= _STD_TOLERANCE
            yield from expect(near, "initial-std", expected, f"{float(weights.std()):.4f}")


def _vectors(model: GPT, config: ModelConfig) -> Iterator[CheckFinding]:
    """Check initial vectors.

    A vector starts at the values that its component declares, else at the option of the same name, a
    norm at 1, and any other vector at 0.
    """
    starts: dict[str, float | Sequence[float]] = dict(_STARTS)
    fixed = {"c_attn": config.attention.projection, "pattern": config.attention.pattern}
    parts = fixed | {part.name: part for part in _components(config)}
    for module, component in parts.items():
        values = {**vars(component), **component.starts(config.shape)}
        starts |= {f"{module}.{name}": value for name, value in values.items()}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            continue
        words = name.split(".")
        ends = [".".join(words[first:]) for first in range(len(words))]
        expected = next((starts[end] for end in ends if end in starts), 0.0)
        start = torch.tensor(expected, dtype=parameter.dtype)
        fits = start.ndim == 0 or start.shape == parameter.shape
        same = fits and torch.allclose(parameter, start, rtol=1e-6, atol=0.0)
        what = f"{_numbers(start)} in the initial {name}"
        yield from expect(same, "initial-value", what, _numbers(parameter))


def _numbers(values: Tensor) -> str:
    """Return the first values of a vector, or the value that all elements have."""
    different = values.detach().unique_consecutive() if values.ndim else values[None]
    shown = ", ".join(f"{float(v):g}" for v in different[:4])
    return shown + (", …" if len(different) > 4 else "")


# The optimized model equals the reference formulas, and strength 0 equals absence.


_REFERENCE_TOLERANCE = 1e-9
# The smallest gradient that is compared relatively, as a share of the largest of the model.
_LEAST_GRADIENT = 1e-5
# Longer than every small window, and three chunks of attention, the last of them shorter.
_LENGTH, _CHUNK_ROWS = 14, 5
# Forms of the loss: a model of another size, or a compiled one, trains by another of them.
_LOSS_FORMS = {
    " from all logits at once": LogitsChunks(block_elements=sys.maxsize),
    " from one chunk of logits": LogitsChunks(block_elements=1),
    " from several chunks of logits": LogitsChunks(chunk_bytes=1, block_elements=1),
}


def check_reference(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check formulas, strength 0 and initialization, in float64 with no parameter at zero."""
    yield from _formulas(subject)
    yield from _statistics(subject)
    yield from _zero_strength(subject)
    config = subject.small_exact.model
    model = GPT(config)
    model.init_weights(subject.small_exact.seed)
    yield from [*_matrices(model, config)][:1]
    yield from _vectors(model, config)


def _by_formulas(
    what: str, actual: Tensor, formula: Tensor, least: float = 0.0
) -> list[CheckFinding]:
    error, expected = relative_error(actual, formula, least), f"{what} by the formulas"
    return within("reference-formulas", expected, error, _REFERENCE_TOLERANCE)


def _formulas(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Compare logits, loss and the gradient of every parameter with the reference."""
    model, ids_BT = subject.model, subject.tokens(2, _LENGTH + 1)
    idx_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:].clone()
    targets_BT[0, 3] = IGNORE_INDEX
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    config = subject.small_exact.model
    logits_by_formula = reference.reference_gpt(idx_BT, parameters, config)
    loss = reference.reference_loss(logits_by_formula, targets_BT, config.z_loss)
    loss.backward()
    # A gradient that is 0 by the formulas, as between two branches that see the same keys, is the
    # rounding error of larger ones.
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    least = _LEAST_GRADIENT * max(float(gradient.abs().max()) for gradient in gradients)
    with subject.chunked(rows=_CHUNK_ROWS) as chunks:
        with torch.no_grad():
            logits = model(idx_BT)
        yield from _by_formulas("logits", logits, logits_by_formula)
        # Without dropout, training computes the same function.
        model.train()
        configured = model.execution
        for form, pieces in {"": configured.logits_chunks, **_LOSS_FORMS}.items():
            model.set_execution(replace(configured, logits_chunks=pieces))
            actual_loss = model(idx_BT, targets_BT)
            actual_loss.backward()
            yield from _by_formulas(f"the loss{form}", actual_loss, loss)
            for name, parameter in model.named_parameters():
                expected = parameters[name].grad
                if parameter.grad is not None and expected is not None:
                    what = f"the gradient of {name}{form}"
                    yield from _by_formulas(what, parameter.grad, expected, least)
            model.zero_grad(set_to_none=True)
        model.eval()
    if chunks is not None:
        # Chunks have equally many tokens, rounded up to whole rows of logits.
        most = chunks.chunk_bytes // actual_loss.element_size() + model.wte.num_embeddings - 1
        largest = max(chunks.elements, default=0)
        what = f"the loss from chunks of at most {most:,} logits, as at the configured size"
        found = f"{largest:,} logits" if largest else "all logits at once"
        yield from expect(0 < largest <= most, "loss-chunks", what, found)


@torch.no_grad()
def _statistics(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare recorded statistics of attention of every block with those by the formulas."""
    model, findings = subject.small_exact.model, []
    if model.attention.pattern.attends:
        return []
    inputs: list[tuple[Any, ...]] = []
    blocks = subject.model.blocks
    hooks = [
        block.attn.register_forward_pre_hook(lambda part, given: inputs.append(given))
        for block in blocks
    ]
    recorded = collect_statistics(subject.model, subject.tokens(1, _LENGTH))
    for hook in hooks:
        hook.remove()
    n_head = model.shape.n_head
    for number, (block, (x_BTC, state, *_)) in enumerate(zip(blocks, inputs, strict=True)):
        first = state.values_BKTH
        formulas = attention_reference.mean_statistics(
            x_BTC,
            reference.with_adapters(dict(block.attn.named_parameters()), model),
            n_head,
            model.attention,
            state.latent_shift_BTR,
            first if first is None else first.repeat_interleave(n_head // first.shape[1], 1),
        )
        for name, formula in formulas.items():
            value = recorded[name][number]
            actual = formula.new_tensor(math.nan if value is None else value)
            findings += _by_formulas(f"{name} in block {number}", actual, formula)
    return findings


def _components(config: ModelConfig) -> list[PartOptions]:
    """Return the options of the components that a model may have or not."""
    return [*config.attention.added, *config.mlp.mechanisms, *config.adapters]


def _zero_strength(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare mechanisms at strength 0 with a model without them."""
    config = subject.small_exact.model
    # A component without a strength has none that could be 0.
    parts = [part for part in _components(config) if part.off]
    if not parts:
        return []
    # Parameters of a mechanism reduce the MLP width under ratio sizing, so the width is fixed here,
    # to GPT-2's: a latent may be wider than the model, and a rule may require a wider MLP.
    sized: dict[str, SymbolValue] = {"MLP_SIZING": "hidden", "MLP_HIDDEN": 0}
    zero = {symbol: value for part in parts for symbol, value in part.off.items()}
    without: dict[str, SymbolValue] = {part.name.upper(): False for part in parts}
    idx_BT = subject.tokens(2, _LENGTH)
    with torch.no_grad():
        off, none = (
            subject.build(with_changes(subject.small_exact, **sized, **changes))(idx_BT)
            for changes in (zero, without)
        )
    expected = f"{', '.join(without)} of strength 0 has no effect on logits"
    return within("zero-strength", expected, relative_error(off, none), _REFERENCE_TOLERANCE)
