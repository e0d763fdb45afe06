"""The built model matches its declaration: parameters, MLP ratio, and the step's own changes."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpt2.check.cases import CheckFinding
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.memory.predict import estimate
from gpt2.mlp.options import PARAMS_TOLERANCE, RATIO_TOLERANCE
from gpt2.model import GPT
from lib.config.field import kconfig_fields
from lib.errors import RunError
from lib.units import GIB, first_of, format_size

# Widths are rounded.
_SHARE_TOLERANCE = 0.01


def check_declared(subject: StepUnderTest) -> list[CheckFinding]:
    """Build the step at its full size on the meta device and check it."""
    model = subject.full_model
    findings = _count(subject.config, model) + _ratio(subject.config, model)
    findings += _shares(subject.config, model) + _flops(subject.config, model)
    return findings + _bound(subject, model) + _delta(subject)


def _count(config: Config, model: GPT) -> list[CheckFinding]:
    """Check that parameters match the declared count, and that all are trainable and registered."""
    findings = []
    built, declared = model.num_params(), config.model.num_params()
    if built != declared:
        expected = f"{declared:,} parameters, as declared"
        findings.append(CheckFinding("parameter-count", expected, f"{built:,} built"))
    target = config.model.mlp.target_params(config.model.shape)
    if config.model.mlp.sizing == "params" and abs(built / target - 1) > PARAMS_TOLERANCE:
        expected = f"{target:,} parameters within 1 %, as MODEL_PARAMS selects"
        findings.append(CheckFinding("model-params", expected, f"{built:,} built"))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        text = f"no gradient for {first_of(frozen)}"
        findings.append(CheckFinding("trainable-parameters", "every parameter is trained", text))
    if strays := list(_strays(model)):
        expected = "every trained tensor is a parameter"
        findings.append(
            CheckFinding("registered-parameters", expected, f"unregistered: {first_of(strays)}")
        )
    return findings


def _ratio(config: Config, model: GPT) -> list[CheckFinding]:
    """Check the ratio of MLP matrices to attention matrices in every block."""
    if config.model.mlp.sizing != "ratio":
        return []
    expected, findings = config.model.mlp.ratio, []
    for i, block in enumerate(model.blocks):
        ratio = matrix_elements(block.mlp) / matrix_elements(block.attn)
        declared = config.model.mlp.built_ratio(config.model.sites()[i])
        if not math.isclose(ratio, declared, rel_tol=1e-9):
            what = f"MLP / attention of {declared:.6f}, as declared"
            findings.append(CheckFinding("declared-ratio", what, f"{ratio:.6f} in block {i}"))
        if abs(ratio / expected - 1) > RATIO_TOLERANCE:
            what = f"MLP / attention of {expected} within 1 %"
            findings.append(CheckFinding("mlp-ratio", what, f"{ratio:.4f} in block {i}"))
    return findings[:1]


def _shares(config: Config, model: GPT) -> list[CheckFinding]:
    """Check the share of each mechanism in the parameters of the MLP, in every block that has it."""
    mlp, findings = config.model.mlp, []
    sized = [mechanism.name for mechanism in mlp.mechanisms if mechanism.sized]
    for i, block in enumerate(model.blocks if mlp.sizing != "hidden" else ()):
        for name, part in block.mlp.mechanisms.items():
            share = matrix_elements(part) / matrix_elements(block.mlp)
            if name in sized and abs(share - mlp.share / len(sized)) > _SHARE_TOLERANCE:
                what = f"MLP_SHARE={mlp.share:g} of the MLP for {len(sized)} mechanisms"
                findings.append(CheckFinding("mlp-share", what, f"{name} {share:.3f} in block {i}"))
    return findings[:1]


def _flops(config: Config, model: GPT) -> list[CheckFinding]:
    """Check that the declared FLOPs have two per weight of a matrix, and those of the scores.

    Native sparse attention applies some matrices once per block of tokens.
    """
    shape, attention = config.model.shape, config.model.attention
    pairs = 4 * shape.n_embd * attention.pattern.mean_keys(shape.block_size)
    for site, block in zip(config.model.sites(), model.blocks, strict=True):
        mlp = config.model.mlp.cost(site).flops
        parts: dict[str, tuple[float, nn.Module, float]] = {"MLP": (mlp, block.mlp, 0.0)}
        if not attention.pattern.attends:
            parts["attention"] = (attention.cost(shape).flops, block.attn, pairs)
        for name, (declared, module, others) in parts.items():
            if declared < (least := 2 * matrix_elements(module) + others):
                what = f"at least {least:,.0f} FLOPs per token of the {name}"
                found = f"{declared:,.0f} declared in block {site.block}"
                return [CheckFinding("declared-flops", what, found)]
    return []


def _bound(subject: StepUnderTest, model: GPT) -> list[CheckFinding]:
    """Check the change in parameter count that the step declares, on the built models."""
    parent = subject.parent
    if subject.case.params is None or parent is None or parent.config is None:
        return []
    low, high = subject.case.params
    change = model.num_params() / subject.for_case(parent).full_model.num_params() - 1
    if low <= change <= high:
        return []
    expected = f"{low:+.1%} to {high:+.1%} parameters against {subject.case.parent}"
    return [CheckFinding("size-change", expected, f"{change:+.1%}: {model.num_params():,} built")]


def _delta(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that each symbol of the step is set in the configuration and in the bound field."""
    values, findings = subject.config.values, []
    fields = dict(_fields(subject.config))
    chosen = {f"{choice}_{value}".upper() for choice, value in values.items()}
    for name, value in subject.case.delta.items():
        if name not in values and value is not (name in chosen):
            findings.append(
                CheckFinding("step-setting", f"{name}={value}", "another member of the choice")
            )
        elif name in values and str(values[name]) != str(value):
            findings.append(
                CheckFinding("step-setting", f"{name}={value}", f"{name}={values[name]}")
            )
        elif name in fields and not _equal(fields[name], value):
            findings.append(
                CheckFinding("step-field", f"{name}={value} in the model", f"{fields[name]}")
            )
    return findings


def _equal(value: Any, expected: Any) -> bool:
    """Compare a field with the value of a symbol.

    Floats are text in a configuration, and all numbers are text on a matrix axis.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(value == (type(value)(expected) if is_number else expected))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield symbol and value of every bound field below ``value``."""
    if isinstance(value, tuple):
        for item in value:
            yield from _fields(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        bound = {f.name: f.metadata["symbol"] for f in kconfig_fields(type(value))}
        for field in dataclasses.fields(value):
            inner = vars(value).get(field.name, None)
            if field.name in bound:
                yield bound[field.name], inner
            else:
                yield from _fields(inner)


def _strays(model: nn.Module) -> Iterator[str]:
    """Yield tensors that require a gradient but are not registered as parameters."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
                yield f"{path}.{name}"


def matrix_elements(module: nn.Module) -> int:
    """Return the number of weights in matrices."""
    return sum(p.numel() for p in module.parameters() if p.ndim >= 2)


# A training step at the configured size runs and fits the memory of its target.
#
# Fake tensors predict the step on any machine; the prediction is recorded with the findings.


def check_full_size(subject: StepUnderTest) -> list[CheckFinding]:
    """Check dimensions, types and peak memory of a training step as configured."""
    config, target = subject.config, subject.context.target(subject.config.machine.device)
    try:
        needs = estimate(config, target)
    except RunError as error:
        return [CheckFinding("training-step", "a training step at the configured size", str(error))]
    name = target if isinstance(target, str) else target.name
    subject.facts["full_size"] = {
        "target": name,
        "parameters": needs.parameters,
        "flops_per_token": needs.flops_per_token,
        "peak_bytes": dict(needs.peak_bytes),
        "stage": needs.stage,
        "cpu_peak_bytes": needs.cpu_peak_bytes,
        "memory_gib": needs.memory_gib,
        "largest_micro_batch": needs.largest_micro_batch,
        "row": needs.row(),
    }
    if needs.fits:
        return []
    largest, memory = needs.largest_micro_batch, format_size(needs.memory_gib * GIB)
    text = f"peak memory of tensors {format_size(needs.total_bytes)} of {memory}"
    if largest:
        steps = config.train.global_batch // (largest * config.train.gpus)
        text += f"; SET='BATCH_SIZE={largest} GRAD_ACCUMULATION={steps}' fits"
    else:
        text += "; a single sequence does not fit either"
    return [CheckFinding("fits-memory", f"BATCH_SIZE={config.train.batch_size} fits {name}", text)]
