"""Checks of what a step computes: causality, decoding, isolation, gradients, the reference.

B batch, T tokens, V vocabulary.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.attention import reference as attention_reference
from gpt2.attention.options import PartOptions
from gpt2.attention.projections import ZeroInitLinear
from gpt2.check.cases import CheckFinding
from gpt2.check.distinct import find_duplicates
from gpt2.check.short_run import GRADIENT_STEPS
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest, name_and_shape
from gpt2.loss import IGNORE_INDEX, LogitsChunks
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from lib.config.field import SymbolValue

_CAUSAL_TOLERANCE = 1e-12


def check_causal(subject: StepUnderTest) -> list[CheckFinding]:
    """Check in float64 that logits depend on no later token, other row or earlier call."""
    with subject.chunked():
        # First, so that a value kept from a call is that of other tokens.
        findings = _by_other_inputs(subject)
        return findings + _by_change(subject) + _by_gradient(subject)


def _by_change(subject: StepUnderTest) -> list[CheckFinding]:
    """Change another token in each row of a batch."""
    positions = _positions(subject.tokens(1).size(1))
    idx_BT = subject.tokens(1).repeat(len(positions), 1)
    changed_BT = idx_BT.clone()
    for row, t in enumerate(positions):
        changed_BT[row, t] = (idx_BT[row, t] + 101) % 256
    exact = not subject.config.model.attention.pattern.data_dependent
    with torch.no_grad():
        before_BTV, after_BTV = subject.model(idx_BT), subject.model(changed_BT)
    for t, before_TV, after_TV in zip(positions, before_BTV, after_BTV, strict=True):
        difference = (after_TV - before_TV)[:t].abs().amax(-1)
        leaks = difference > (0.0 if exact else _CAUSAL_TOLERANCE)
        if bool(leaks.any()):
            first = int(leaks.nonzero()[0])
            text = f"logits at {first} change by {float(difference.max()):.1e}"
            expected = f"token {t} changes no logits before {t}"
            return [CheckFinding("causal-logits", expected, text)]
        if torch.equal(after_TV[t:], before_TV[t:]):
            expected = f"token {t} changes logits from {t} on"
            return [CheckFinding("token-affects-logits", expected, "no change")]
    return []


def _by_gradient(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that ∂ logits at t / ∂ embedding at s is 0 for s > t.

    Each row of the batch tests another t.
    """
    model = subject.model
    positions = _positions(subject.tokens(1).size(1))[:-1]
    idx_BT = subject.tokens(1).expand(len(positions), -1)
    embedded: list[Tensor] = []
    hook = model.wte.register_forward_hook(lambda module, inputs, out: embedded.append(out))
    logits = model(idx_BT)
    hook.remove()
    rows = range(len(positions))
    selected = torch.stack([logits[b, t] for b, t in zip(rows, positions, strict=True)])
    (gradient,) = torch.autograd.grad(selected.square().sum(), embedded[:1])
    for b, t in zip(rows, positions, strict=True):
        later = gradient[b, t + 1 :].abs().amax(-1)
        if bool(later.any()):
            source = t + 1 + int(later.nonzero()[0])
            expected = f"logits at {t} do not depend on token {source}"
            return [
                CheckFinding("causal-gradient", expected, f"a gradient of {float(later.max()):.1e}")
            ]
        if not bool(gradient[b, t].any()):
            expected = f"logits at {t} depend on token {t}"
            return [CheckFinding("token-gradient", expected, "a gradient of zero")]
    return []


def _positions(length: int) -> list[int]:
    """Return the second position, two in the middle, and the last one."""
    return sorted({1, length // 3, length // 2 + 1, length - 1})


def _by_other_inputs(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that a row depends neither on the others nor on earlier calls, in any place."""
    model, idx_BT = subject.model, subject.tokens(3)
    changed_BT = idx_BT.clone()
    changed_BT[1] = idx_BT[1].flip(0)
    with torch.no_grad():
        before, after = model(idx_BT), model(changed_BT)
        moved = model(changed_BT.roll(1, 0)).roll(-1, 0)
    findings = []
    if not torch.equal(before[::2], after[::2]):
        expected = "rows 0 and 2 do not depend on row 1 of the batch"
        findings.append(CheckFinding("independent-rows", expected, "other logits"))
    if not (error := _error(moved, after)) <= _CAUSAL_TOLERANCE:
        expected = "the same logits of each row in another call and place"
        findings.append(
            CheckFinding("stateless-call", expected, f"a relative error of {error:.1e}")
        )
    return findings


def check_distinct(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare the step with every other step that resolves."""
    cases = {slug: case for slug, case in subject.study_cases.items() if case.config}
    fingerprints = {slug: subject.for_case(case).fingerprint for slug, case in cases.items()}
    fingerprints[subject.case.slug] = subject.fingerprint
    return find_duplicates(subject.case.slug, fingerprints)


# Steps of a difference in float64, and its relative error. A weight that crosses a threshold within the
# first step makes a difference that is no derivative.
_DIFFERENCES = (1e-6, 1e-7, 1e-8)
_DERIVATIVE_TOLERANCE = 1e-5


# Every parameter learns: its gradient is finite and nonzero, and the optimizer updates it.


def check_gradients(subject: StepUnderTest) -> list[CheckFinding]:
    """Check gradients from the real initialization and from filled parameters."""
    findings = _from_initialization(subject) + _from_filled(subject)
    return findings + _optimized(subject) + _with_dropout(subject)


def _from_initialization(subject: StepUnderTest) -> list[CheckFinding]:
    traced, findings = subject.traced_run, []
    # The step of SGD scales with the gradient and may be below the fp32 resolution of a weight.
    always_moves = subject.config.optimizer.name != "sgd"
    for name, before in traced.initial_weights.items():
        if name in traced.nonfinite:
            expected = f"a finite gradient of {name}"
            findings.append(CheckFinding("finite-gradient", expected, "NaN or infinite"))
        elif name not in traced.with_gradient:
            text = f"none or zero in {GRADIENT_STEPS} optimizer steps from the initialization"
            findings.append(CheckFinding("nonzero-gradient", f"a gradient of {name}", text))
        elif always_moves and torch.equal(traced.weights_after_gradient_steps[name], before):
            text = f"no change after {GRADIENT_STEPS} optimizer steps"
            findings.append(CheckFinding("moving-parameter", f"the optimizer updates {name}", text))
    return findings


def _from_filled(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the gradients of the fingerprint, whose parameters are filled."""
    findings, gradients = [], subject.fingerprint.gradients
    for name, parameter in subject.model.named_parameters():
        _, norm = gradients.get(name_and_shape(name, parameter), (0.0, 0.0))
        if norm == 0.0:
            text = "none or zero, although no parameter is zero"
            findings.append(CheckFinding("nonzero-gradient", f"a gradient of {name}", text))
        elif not math.isfinite(norm):
            expected = f"a finite gradient of {name}"
            findings.append(CheckFinding("finite-gradient", expected, "NaN or infinite"))
    return findings


def _with_dropout(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that backward uses the masks of forward: gradients in float64 against differences.

    Checked is the derivative along a random direction, once with stored and once with recomputed
    blocks. A mechanism that detaches a value has another gradient by design.
    """
    parts = _components(subject.small_exact.model)
    options = [option for part in parts for option in vars(part).items()]
    detaches = any(value for name, value in options if name.startswith("detach"))
    dropping = None if detaches else subject.dropping
    if dropping is None:
        return []
    dropping.train()
    what = "a gradient with the dropout masks of the forward pass"
    return [
        CheckFinding("dropout-gradient", what, f"another derivative, {how}")
        for how, equal in _derivatives(subject, dropping).items()
        if not equal
    ]


def _derivatives(subject: StepUnderTest, model: GPT) -> dict[str, bool]:
    """Return whether the gradient is the derivative, with stored and with recomputed blocks."""
    idx_BT = subject.tokens(1)

    def loss() -> Tensor:
        with torch.random.fork_rng([]), subject.chunked(model):
            torch.manual_seed(0)
            value: Tensor = model(idx_BT[:, :-1], idx_BT[:, 1:])
            if value.requires_grad:
                value.backward()
        return value

    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    before = [p.detach().clone() for p in parameters]

    def difference(step: float) -> float:
        losses = []
        with torch.no_grad():
            for signed in (step, -step):
                for parameter, start, v in zip(parameters, before, directions, strict=True):
                    parameter.copy_(start + signed * v)
                losses.append(float(loss()))
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start)
        return (losses[0] - losses[1]) / (2 * step)

    expected, equal = [difference(_DIFFERENCES[0])], {}
    for recomputed in (False, True):
        model.grad_checkpointing = recomputed
        loss()
        pairs = [(p.grad, v) for p, v in zip(parameters, directions, strict=True)]
        derivative = sum(float((grad * v).sum()) for grad, v in pairs if grad is not None)
        how = "recomputed blocks" if recomputed else "stored blocks"
        model.zero_grad(set_to_none=True)
        for step in _DIFFERENCES[len(expected) :]:
            if not _any_close(expected, derivative):
                expected.append(difference(step))
        equal[how] = _any_close(expected, derivative)
    model.grad_checkpointing = False
    return equal


def _any_close(differences: list[float], derivative: float) -> bool:
    return any(abs(d - derivative) <= _DERIVATIVE_TOLERANCE * abs(d) for d in differences)


def _optimized(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that each parameter is in exactly one parameter group of the optimizer."""
    session = subject.traced_run.run.session
    grouped = [id(p) for group in session.state.optimizer.param_groups for p in group["params"]]
    return [
        CheckFinding(
            "optimizer-groups",
            f"{name} in one parameter group",
            f"in {grouped.count(id(parameter))}",
        )
        for name, parameter in session.state.model.named_parameters()
        if grouped.count(id(parameter)) != 1
    ]


# Matrices start as in GPT-2, and vectors of a mechanism as its options configure.


# Elements that determine a standard deviation to 3 %, and the relative tolerance.
_MIN_ELEMENTS = 500
_STD_TOLERANCE = 0.15
# Vectors without an option: weights of norms, and factors, which start as the identity.
_STARTS = {"weight": 1.0, "factors": 1.0}


def check_initialization(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the initial weights of the model."""
    config = subject.small_exact.model
    model = GPT(config)
    model.init_weights(subject.small_exact.seed)
    return _matrices(model, config) + _vectors(model, config)


def _matrices(model: GPT, config: ModelConfig) -> list[CheckFinding]:
    """Check the standard deviation of initial matrices.

    It is 0.02, and 0.02 / √(2·n_layer) into the residual stream; a ZeroInitLinear starts at 0.
    """
    shape = config.shape
    zero = [f"{path}.weight" for path, m in model.named_modules() if isinstance(m, ZeroInitLinear)]
    for name, parameter in model.named_parameters():
        weights = parameter[: shape.vocab_size] if name == "wte.weight" else parameter
        std = 0.02 / math.sqrt(2 * shape.n_layer) if name.endswith("c_proj.weight") else 0.02
        if name in zero and bool(weights.any()):
            return [CheckFinding("initial-zero", f"0 in the initial {name}", "nonzero values")]
        if name in zero or weights.ndim < 2 or weights.numel() < _MIN_ELEMENTS:
            continue
        if abs(float(weights.detach().std()) / std - 1) > _STD_TOLERANCE:
            text = f"{float(weights.detach().std()):.4f}"
            expected = f"a standard deviation of {std:.4f} of the initial {name}"
            return [CheckFinding("initial-std", expected, text)]
    return []


def _vectors(model: GPT, config: ModelConfig) -> list[CheckFinding]:
    """Check initial vectors.

    A vector starts at the values that its component declares, else at the option of the same name, a
    norm at 1, and any other vector at 0.
    """
    starts: dict[str, float | Sequence[float]] = dict(_STARTS)
    for module, component in _modules(config).items():
        values = {**vars(component), **component.starts(config.shape)}
        starts |= {f"{module}.{name}": value for name, value in values.items()}
    findings = []
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            continue
        parts = name.split(".")
        ends = [".".join(parts[first:]) for first in range(len(parts))]
        expected = next((starts[end] for end in ends if end in starts), 0.0)
        start = torch.tensor(expected, dtype=parameter.dtype)
        fits = start.ndim == 0 or start.shape == parameter.shape
        if not fits or not torch.allclose(parameter, start, rtol=1e-6, atol=0.0):
            what = f"{_numbers(start)} in the initial {name}"
            findings.append(CheckFinding("initial-value", what, _numbers(parameter)))
    return findings


def _numbers(values: Tensor) -> str:
    """Return the first values of a vector, or the value that all elements have."""
    different = values.detach().unique_consecutive() if values.ndim else values[None]
    shown = ", ".join(f"{float(v):g}" for v in different[:4])
    return shown + (", …" if len(different) > 4 else "")


# The optimized model equals the reference formulas, and strength 0 equals absence.
#
# B batch, T tokens.


_REFERENCE_TOLERANCE = 1e-9
# Longer than every small window, and three chunks of attention, the last of them shorter.
_LENGTH, _CHUNK_ROWS = 14, 5
# Forms of the loss: a model of another size, or a compiled one, trains by another of them.
_LOSS_FORMS = {
    " from all logits at once": LogitsChunks(block_elements=sys.maxsize),
    " from one chunk of logits": LogitsChunks(block_elements=1),
    " from several chunks of logits": LogitsChunks(chunk_bytes=1, block_elements=1),
}


def check_reference(subject: StepUnderTest) -> list[CheckFinding]:
    """Check formulas, strength 0 and initialization, in float64 with no parameter at zero."""
    findings = _formulas(subject) + _statistics(subject)
    return findings + _zero_strength(subject) + check_initialization(subject)


def _formulas(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare logits, loss and the gradient of every parameter with the reference."""
    model = subject.model
    ids_BT = subject.tokens(2, _LENGTH + 1)
    idx_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:].clone()
    targets_BT[0, 3] = IGNORE_INDEX
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    logits_by_formula = reference.reference_gpt(idx_BT, parameters, subject.small_exact.model)
    loss = torch.nn.functional.cross_entropy(
        logits_by_formula.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX
    )
    loss.backward()
    with subject.chunked(rows=_CHUNK_ROWS) as chunks:
        with torch.no_grad():
            logits = model(idx_BT)
        pairs = {"logits": (logits, logits_by_formula)}
        # Without dropout, training computes the same function.
        model.train()
        configured = model.execution
        for form, pieces in {"": configured.logits_chunks, **_LOSS_FORMS}.items():
            model.set_execution(replace(configured, logits_chunks=pieces))
            actual_loss = model(idx_BT, targets_BT)
            actual_loss.backward()
            pairs[f"the loss{form}"] = (actual_loss, loss)
            for name, parameter in model.named_parameters():
                expected = parameters[name].grad
                if parameter.grad is not None and expected is not None:
                    pairs[f"the gradient of {name}{form}"] = (parameter.grad, expected)
            model.zero_grad(set_to_none=True)
        model.eval()
    findings = [
        CheckFinding(
            "reference-formulas", f"{what} by the formulas", f"a relative error of {error:.1e}"
        )
        for what, (actual, formula) in pairs.items()
        if not (error := _error(actual, formula)) <= _REFERENCE_TOLERANCE
    ]
    # Chunks have equally many tokens, rounded up to whole rows of logits.
    row = model.wte.num_embeddings
    most = 0 if chunks is None else chunks.chunk_bytes // actual_loss.element_size() + row - 1
    if chunks and not (chunks.elements and max(chunks.elements) <= most):
        what = f"the loss from chunks of at most {most:,} logits, as at the configured size"
        found = f"{max(chunks.elements):,} logits" if chunks.elements else "all logits at once"
        findings.append(CheckFinding("loss-chunks", what, found))
    return findings


@torch.no_grad()
def _statistics(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare the recorded entropy of every block with that of the weights by the formulas."""
    options, findings = subject.small_exact.model.attention, []
    if options.pattern.attends:
        return []
    inputs: list[tuple[Any, ...]] = []
    blocks = subject.model.blocks
    hooks = [
        block.attn.register_forward_pre_hook(lambda part, given: inputs.append(given))
        for block in blocks
    ]
    subject.model(subject.tokens(1, _LENGTH))
    for hook in hooks:
        hook.remove()
    for number, (block, (x_BTC, state, *_)) in enumerate(zip(blocks, inputs, strict=True)):
        actual = block.attn.statistics(x_BTC, state)["attention/entropy"]
        formula = attention_reference.mean_entropy(
            x_BTC,
            dict(block.attn.named_parameters()),
            subject.small_exact.model.shape.n_head,
            options,
            state.latent_shift_BTR,
        )
        if not (error := _error(actual, formula)) <= _REFERENCE_TOLERANCE:
            what = f"the entropy of attention in block {number} by the formulas"
            findings.append(
                CheckFinding("reference-formulas", what, f"a relative error of {error:.1e}")
            )
    return findings


def _components(config: ModelConfig) -> list[PartOptions]:
    """Return the options of the components that a model may have or not."""
    attention = config.attention
    return [*attention.transforms, *attention.terms, *attention.gates, *config.mlp.mechanisms]


def _modules(config: ModelConfig) -> dict[str, PartOptions]:
    """Return the options of every component, by the name of its module in a block."""
    attention = config.attention
    fixed = {"c_attn": attention.projection, "pattern": attention.pattern}
    return {**fixed, **{part.name: part for part in _components(config)}}


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
        off = subject.build(with_changes(subject.small_exact, **sized, **zero))(idx_BT)
        none = subject.build(with_changes(subject.small_exact, **sized, **without))(idx_BT)
    if (error := _error(off, none)) <= _REFERENCE_TOLERANCE:
        return []
    expected = f"{', '.join(without)} of strength 0 has no effect"
    return [CheckFinding("zero-strength", expected, f"logits have a relative error of {error:.1e}")]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value unless that is 0."""
    difference, size = (actual - expected).detach().abs().max(), expected.detach().abs().max()
    return float(difference / size) if size else float(difference)
