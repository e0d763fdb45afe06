"""The check ``device``: forms of a step that a compiler or a GPU runs, against rows of attention.

On a GPU, the configured step itself is compared; without one, the Triton kernels of its small form
in Triton's interpreter. Under COMPILE, one step of the study is compiled for the CPU.
"""

import importlib.util
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2.attention.backends import is_plain
from gpt2.check.finding import CheckFinding, expect
from gpt2.check.shrink import NO_DROPOUT, with_changes
from gpt2.check.subject import StepUnderTest, fill_parameters
from gpt2.config import Config
from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT
from lib.config.field import SymbolValue
from lib.env.hardware import device_name
from lib.env.machine import autocast
from lib.env.preflight import compiler_problems
from lib.errors import ConfigError

_TOLERANCE = 1e-9
# A form in the precision of the run may have this many times the error of rows in this precision,
# and this error: both round, in another order.
_ROUNDING_FACTOR, _ROUNDING = 4.0, 1e-4
# A statistic is a mean or an extreme value of many roundings, by which its own error varies.
_STATISTICS_ROUNDING = 1e-2
# The interpreter takes seconds for a top-k of twice as many.
_INTERPRETED_TOKENS = 20
# Heads, windows and blocks of the kernels that a step runs on a GPU, and on a CPU and as the reference.
_BY_TRITON: Mapping[str, SymbolValue] = {"ATTENTION_BACKEND": "triton", "NSA_BACKEND": "triton"}
_BY_ROWS: Mapping[str, SymbolValue] = {"ATTENTION_BACKEND": "rows", "NSA_BACKEND": "gather"}
# Shares of gates beyond a threshold: a rounding moves a gate across it.
_COUNTED = ("_closed", "_open")
# Loss, gradient of a parameter, or statistic with a value per block → value in float64.
Values = dict[str, Tensor]


def check_device(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare loss and gradients of the forms that the step has."""
    if torch.cuda.is_available():
        return on_device(subject, torch.device("cuda", torch.cuda.current_device()))
    findings = []
    if subject.config.machine.compile and subject.context.is_first("compiled"):
        findings += _compiled(subject)
    return findings + _interpreted(subject)


def _compiled(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare the small step, compiled for the CPU, with itself as it is."""
    for problem in compiler_problems("cpu"):
        found = f"{problem.what}; {problem.next}"
        return [CheckFinding("compiled-loss", "a compiler for COMPILE=y on a CPU", found, True)]
    small, ids_BT, cpu = subject.small_exact, subject.tokens(), torch.device("cpu")
    exact = _values_of(small, torch.float64, ids_BT, cpu)
    torch._dynamo.reset()
    compiled = _values_of(with_changes(small, COMPILE=True), torch.float64, ids_BT, cpu)
    return _differences("compiled-loss", "compiled", compiled, exact)


def _interpreted(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare the Triton kernels of the small step in fp32, in the interpreter, with rows."""
    small = subject.small_exact
    if small.model.attention.pattern.attends:
        # The backend of native sparse attention for a GPU refuses a CPU; its kernels have tests.
        return []
    try:
        by_triton = with_changes(small, **_backends(small, _BY_TRITON))
    except ConfigError:
        # The kernels refuse a component; the run takes rows.
        return []
    if by_triton == small:
        return []
    if importlib.util.find_spec("triton") is None:
        expected = "the package triton, whose interpreter runs the kernels without a GPU"
        found = "none; type: make setup EXTRAS=triton"
        return [CheckFinding("triton-kernels", expected, found, True)]
    assert (
        os.environ.get("TRITON_INTERPRET") == "1"
    ), "workers of the check set it before the import"
    ids_BT, cpu = subject.tokens(1, _INTERPRETED_TOKENS + 1), torch.device("cpu")
    exact = _values_of(small, torch.float64, ids_BT, cpu)
    rows = _values_of(small, torch.float32, ids_BT, cpu)
    # The interpreter computes masked rows with numpy, which warns of them.
    with np.errstate(invalid="ignore", divide="ignore"):
        tiled = _values_of(by_triton, torch.float32, ids_BT, cpu)
    return _differences("triton-kernels", "by Triton kernels", tiled, exact, rows)


def on_device(subject: StepUnderTest, device: torch.device) -> list[CheckFinding]:
    """Compare the configured step, in its precision and compiled if it is, with rows in float64."""
    config = with_changes(subject.config, **NO_DROPOUT)
    by_rows = with_changes(config, COMPILE=False, **_backends(config, _BY_ROWS))
    length = min(config.model.shape.block_size, len(subject.context.tokens))
    ids_BT = torch.from_numpy(subject.context.tokens[None, :length]).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        exact = _values_of(by_rows, torch.float64, ids_BT, device)
        rows = _values_of(by_rows, torch.float32, ids_BT, device)
        actual = _values_of(config, torch.float32, ids_BT, device)
    return _differences("device-step", f"on {device_name(device)}", actual, exact, rows)


def _backends(config: Config, backends: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return the backend that acts in this configuration: attention's, or that of its pattern."""
    nsa = config.model.attention.pattern.name == "nsa"
    if not nsa and is_plain(config.model.attention, True in config.model.reads_weights):
        return {}
    name = "NSA_BACKEND" if nsa else "ATTENTION_BACKEND"
    return {name: backends[name]}


def _values_of(config: Config, dtype: torch.dtype, ids_BT: Tensor, device: torch.device) -> Values:
    """Return loss, gradients and statistics of a filled model, in float64 or as configured."""
    model = GPT(config.model)
    model.init_weights(config.seed)
    fill_parameters(model)
    model.to(device, dtype).train()
    forward: Any = torch.compile(model) if config.machine.compile else model
    exact = dtype == torch.float64
    with nullcontext() if exact else autocast(config.machine):
        loss = forward(ids_BT[:, :-1], ids_BT[:, 1:])
    loss.backward()
    values = {"loss": loss.detach().double()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[f"gradient of {name}"] = parameter.grad.double()
    with nullcontext() if exact else autocast(config.machine):
        by_name = collect_statistics(model.eval(), ids_BT[:, :-1])
    for name, row in by_name.items():
        if not name.endswith(_COUNTED):
            # A block without the mechanism, such as the last one without a gate, has no number.
            numbers = [0.0 if x is None else x for x in row]
            values[f"statistic {name}"] = torch.tensor(numbers).double()
    return values


def _differences(
    kind: str, form: str, actual: Values, exact: Values, rows: Values | None = None
) -> list[CheckFinding]:
    """Return a finding for each value whose error is above its limit, or that is missing.

    The limit is that of float64, or follows from the error of ``rows`` in the precision of the run.
    """
    findings = []
    for name, expected in exact.items():
        error = _error(actual[name], expected) if name in actual else math.inf
        limit = _TOLERANCE
        if rows is not None:
            floor = _STATISTICS_ROUNDING if name.startswith("statistic") else _ROUNDING
            limit = _ROUNDING_FACTOR * _error(rows[name], expected) + floor
        found = f"a relative error of {error:.1e} {form} (at most {limit:.0e})"
        findings += expect(error <= limit, kind, f"the {name} by rows in float64", found)
    return findings


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the error relative to the norm; the error if nothing is expected."""
    error, norm = float((actual - expected).norm()), float(expected.norm())
    return error / norm if norm > 1e-12 else error
