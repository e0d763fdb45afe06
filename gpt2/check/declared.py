"""What the configuration declares is what is built: parameters, ratio, the step's own change."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.config import Config
from gpt2.mlp.options import RATIO_TOLERANCE
from gpt2.model import GPT
from lib.binding import bound_fields


def check(subject: Subject) -> list[Finding]:
    """Builds the step at its full size, without memory for it."""
    model = _built(subject.config)
    # For the steps that are measured against this one.
    subject.workshop.built_params[subject.case.slug] = model.num_params()
    found = _count(subject.config, model) + _ratio(subject.config, model)
    return found + _bound(subject, model) + _delta(subject)


def _built(config: Config) -> GPT:
    with torch.device("meta"):
        return GPT(config.model)


def _count(config: Config, model: GPT) -> list[Finding]:
    """As many parameters as declared, all of them trainable, none outside the model's list."""
    found = []
    built, declared = model.num_params(), config.model.num_params()
    if built != declared:
        found.append(Finding(f"{declared:,} parameters, as declared", f"{built:,} built"))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        found.append(Finding("every parameter is trained", f"{_few(frozen)} takes no gradient"))
    if strays := list(_strays(model)):
        found.append(Finding("every trained tensor is a parameter", f"{_few(strays)} is none"))
    return found


def _ratio(config: Config, model: GPT) -> list[Finding]:
    """Matrices of the MLP / matrices of attention, counted in every block."""
    if config.model.mlp.sizing != "ratio":
        return []
    wanted, found = config.model.mlp.ratio, []
    for i, block in enumerate(model.h):
        built = _matrices(block.mlp) / _matrices(block.attn)
        if abs(built / wanted - 1) > RATIO_TOLERANCE:
            text = f"block {i} is built at {built:.4f}"
            found.append(Finding(f"MLP / attention of {wanted} within 1 %", text))
    return found[:1]


def _bound(subject: Subject, model: GPT) -> list[Finding]:
    """The change of the parameter count that the step promises, on what is built."""
    parent = subject.parent
    if subject.case.params is None or parent is None or parent.config is None:
        return []
    low, high = subject.case.params
    counted = subject.workshop.built_params
    if parent.slug not in counted:
        counted[parent.slug] = _built(parent.config).num_params()
    change = model.num_params() / counted[parent.slug] - 1
    if low <= change <= high:
        return []
    expected = f"{low:+.1%} to {high:+.1%} parameters against {subject.case.parent}"
    return [Finding(expected, f"{change:+.1%}: {model.num_params():,} built")]


def _delta(subject: Subject) -> list[Finding]:
    """Every symbol of the step stands in the configuration, and in the field that reads it."""
    values, found = subject.config.values, []
    fields = dict(_fields(subject.config))
    chosen = {f"{choice}_{value}".upper() for choice, value in values.items()}
    for name, wanted in subject.case.delta.items():
        if name not in values and wanted is not (name in chosen):
            found.append(Finding(f"{name}={wanted}", "another member of its choice"))
        elif name in values and str(values[name]) != str(wanted):
            found.append(Finding(f"{name}={wanted}", f"{name}={values[name]}"))
        elif name in fields and not _equal(fields[name], wanted):
            found.append(Finding(f"{name}={wanted} in the model", f"{fields[name]}"))
    return found


def _equal(value: Any, wanted: Any) -> bool:
    """A float stands as text in a configuration, and every number on an axis."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(value == (type(value)(wanted) if is_number else wanted))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Symbol and value of every bound field below ``value``."""
    if isinstance(value, tuple):
        for item in value:
            yield from _fields(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        bound = {f.name: f.metadata["symbol"] for f in bound_fields(type(value))}
        for field in dataclasses.fields(value):
            inner = vars(value)[field.name] if field.name in vars(value) else None
            if field.name in bound:
                yield bound[field.name], inner
            else:
                yield from _fields(inner)


def _strays(model: nn.Module) -> Iterator[str]:
    """Tensors that want a gradient and hang on a module without being its parameter."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
                yield f"{path}.{name}"


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim >= 2)


def _few(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
