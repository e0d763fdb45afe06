"""``make validate-machine``: check native sparse attention on this device, by every backend."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.check.subject import fill_parameters
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.nsa.options import NsaOptions, resolve_backend
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.hardware import device_name
from lib.errors import EXIT_DONE, EXIT_FAILED, PreflightError
from lib.report.render import json_document, markdown_table

BACKENDS = ("blocks", "gather", "triton")
_SMALL: dict[str, SymbolValue] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 1,
    "N_HEAD": 4,
    "N_EMBD": 64,
    "N_KV_HEAD": 2,
    "BLOCK_SIZE": 72,
    "DROPOUT": "0.0",
    "TOKENIZER_BYTE": True,
    "ATTENTION_PROJECTION_GROUPED": True,
    "ATTENTION_PATTERN_NSA": True,
    "NSA_COMPRESS_BLOCK": 4,
    "NSA_COMPRESS_STRIDE": 2,
    "NSA_SELECT_BLOCK": 6,
    "NSA_SELECT_COUNT": 4,
    "NSA_WINDOW": 8,
}
# Tokens compared with the slow query-by-query reference: five blocks, of which four are selected.
_REFERENCE_LENGTH = 29
# Tolerances relative to the norm: in float64, of half-precision types, and of sums in other orders.
_FP64_TOLERANCE, _HALF_TOLERANCE, _ORDER_TOLERANCE = 1e-9, 2e-2, 1e-3
# Tokens of the long-context check: by default, and with FULL=1 on a CPU and on a GPU.
_LONG_CONTEXT, _FULL_CONTEXT_CPU, _FULL_CONTEXT_GPU = 1024, 8192, 65536


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Validate native sparse attention on this device before training with it.

    kablate validate-machine           a few seconds
    kablate validate-machine --full    with 8192 tokens on a CPU, 65,536 on a GPU
    kablate validate-machine --device cpu

    For every backend of the selected branch: values and gradients against the float64 reference,
    bfloat16 and float16, and decoding after a long context against the full forward pass. Reports
    PASS, FAIL, or ABSENT with the reason if the device does not support it. Exit codes: 0 no
    failure, 1 a failure, 2 usage.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    log("CHECK", f"{device_name(device)}, torch {torch.__version__}")
    rows = validate_device(device, options.full)
    code = EXIT_FAILED if any(row["state"] == "FAIL" for row in rows) else EXIT_DONE
    if options.json:
        return code, json_document(1, {"device": device_name(device), "rows": rows})
    cells = [[str(value) for value in row.values()] for row in rows]
    return code, markdown_table(
        ("check", "backend", "", "seconds", "detail"), cells, left=(0, 1, 2, 4)
    )


def validate_device(device: torch.device, full: bool) -> list[dict[str, str | float]]:
    """Return check, backend, state, seconds and detail of every check of every backend."""
    length = _LONG_CONTEXT
    if full:
        length = _FULL_CONTEXT_CPU if device.type == "cpu" else _FULL_CONTEXT_GPU
    checks: dict[str, Callable[[Config, torch.device], str]] = {
        "float64 reference": _parity,
        "bfloat16": partial(_half_precision, dtype=torch.bfloat16),
        "float16": partial(_half_precision, dtype=torch.float16),
        f"{length} tokens": partial(_long_context, length=length),
    }
    rows: list[dict[str, str | float]] = []
    for backend in BACKENDS:
        settings = _SMALL | {f"NSA_BACKEND_{backend.upper()}": True}
        layer = ConfigLayer.of("validation", "make validate-machine", settings)
        config = resolve_config(KconfigTree(), [layer])
        for name, check in checks.items():
            started = time.perf_counter()
            try:
                pattern = config.model.attention.pattern
                assert isinstance(pattern, NsaOptions)
                resolve_backend(pattern, device.type)
                detail = check(config, device)
                state = "FAIL" if detail else "PASS"
            except (PreflightError, NotImplementedError) as error:
                state, detail = "ABSENT", " ".join(str(error).split())
            seconds = round(time.perf_counter() - started, 1)
            row: dict[str, str | float] = {"check": name, "backend": backend, "state": state}
            rows.append(row | {"seconds": seconds, "detail": detail})
    return rows


def _model(
    config: Config, device: torch.device, dtype: torch.dtype, length: int
) -> tuple[GPT, Tensor]:
    """Return a model without a parameter that is zero, and tokens for it."""
    shape = replace(config.model.shape, block_size=length)
    model = GPT(replace(config.model, shape=shape))
    model.init_weights(config.seed)
    fill_parameters(model.double())
    idx_BT = torch.arange(length, device=device)[None] * 37 % shape.vocab_size
    return model.to(device, dtype).eval(), idx_BT


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Return a description of the relative difference if it exceeds ``tolerance``, else ""."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    error = float((actual - expected).norm() / expected.norm())
    return "" if error <= tolerance else f"differs by {error:.1e} of the norm"


def _parity(config: Config, device: torch.device) -> str:
    """Compare logits and the gradient of every parameter with the reference."""
    model, idx_BT = _model(config, device, torch.float64, _REFERENCE_LENGTH)
    parameters = {n: p.detach().cpu().requires_grad_() for n, p in model.named_parameters()}
    actual = model(idx_BT), *_gradients(model(idx_BT), model.parameters())
    logits = reference.reference_gpt(idx_BT.cpu(), parameters, model.config)
    expected = logits, *_gradients(logits, parameters.values())
    for name, one, other in zip(("logits", *parameters), actual, expected, strict=True):
        if difference := _difference(one, other, _FP64_TOLERANCE):
            return f"{name}: {difference}"
    return ""


def _gradients(logits_BTV: Tensor, parameters: Iterable[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(logits_BTV.square().mean(), [*parameters], materialize_grads=True)


@torch.no_grad()
def _half_precision(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Compare autocast to ``dtype`` with fp32."""
    model, idx_BT = _model(config, device, torch.float32, config.model.shape.block_size)
    expected = model(idx_BT)
    with torch.autocast(device.type, dtype=dtype):
        return _difference(model(idx_BT).float(), expected, _HALF_TOLERANCE)


@torch.no_grad()
def _long_context(config: Config, device: torch.device, length: int) -> str:
    """Compare decoding of the last token of a long sequence with the full forward pass."""
    model, idx_BT = _model(config, device, torch.float32, length)
    cache = model.new_cache()
    model.hidden(idx_BT[:, :-1], cache)
    last_BTC = model.hidden(idx_BT[:, -1:], cache)
    return _difference(last_BTC, model.hidden(idx_BT)[:, -1:], _ORDER_TOLERANCE)
