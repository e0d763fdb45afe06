"""``make validate-machine``: check native sparse attention on this device, by every backend.

B batch, T tokens, V vocabulary, N heads, K key/value heads, H head dim.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.check.subject import fill_parameters
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.cache import BranchKeyValues, KeyValue, NsaCache
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.options import BRANCHES, NsaOptions, resolve_backend
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.observe import device_name
from lib.errors import EXIT_DONE, EXIT_FAILED, PreflightError
from lib.report.render import json_document, markdown_table

BACKENDS = ("blocks", "gather", "triton")
_SMALL: dict[str, SymbolValue] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
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
_LENGTH = 72
# Tokens compared with the slow query-by-query reference: five blocks, of which four are selected.
_REFERENCE_LENGTH = 29
# Tolerance in float64, relative to the largest element.
_FP64_TOLERANCE = 1e-9
# Tolerance in fp32, relative to the largest element, for sums in different orders.
_FP32_TOLERANCE = 1e-3
# Tolerance of half-precision types, relative to the norm.
_HALF_TOLERANCE = 2e-2
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
                resolve_backend(_options(config), device.type)
                detail = check(config, device)
                state = "FAIL" if detail else "PASS"
            except (PreflightError, NotImplementedError) as error:
                state, detail = "ABSENT", " ".join(str(error).split())
            seconds = round(time.perf_counter() - started, 1)
            row: dict[str, str | float] = {"check": name, "backend": backend, "state": state}
            rows.append(row | {"seconds": seconds, "detail": detail})
    return rows


def _options(config: Config) -> NsaOptions:
    return cast(NsaOptions, config.model.attention.pattern)


def _model(config: Config, device: torch.device, dtype: torch.dtype = torch.float64) -> GPT:
    # No parameter is zero.
    model = GPT(config.model)
    model.init_weights(config.seed)
    fill_parameters(model.double())
    return model.to(device, dtype).eval()


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Return a description of the relative difference if it exceeds ``tolerance``, else ""."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    error = float((actual - expected).abs().max() / expected.abs().max())
    return "" if error <= tolerance else f"differs by {error:.1e} of the largest"


def _parity(config: Config, device: torch.device) -> str:
    """Compare logits and the gradient of every parameter with the reference."""
    model = _model(config, device)
    idx_BT = torch.arange(_REFERENCE_LENGTH, device=device)[None] * 37 % 256
    parameters = {n: p.detach().cpu().requires_grad_() for n, p in model.named_parameters()}
    expected = reference.reference_gpt(idx_BT.cpu(), parameters, config.model)
    actual = model(idx_BT)
    if difference := _difference(actual, expected, _FP64_TOLERANCE):
        return difference
    gradients, expected_gradients = (
        torch.autograd.grad(logits.square().mean(), list(leaves), materialize_grads=True)
        for logits, leaves in ((actual, model.parameters()), (expected, parameters.values()))
    )
    pairs = zip(parameters, gradients, expected_gradients, strict=True)
    for name, gradient, expected_gradient in pairs:
        if difference := _difference(gradient, expected_gradient, _FP64_TOLERANCE):
            return f"gradient of {name}: {difference}"
    return ""


@torch.no_grad()
def _half_precision(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Compare autocast to ``dtype`` with fp32."""
    model = _model(config, device, torch.float32)
    idx_BT = torch.arange(2 * _LENGTH, device=device).view(2, _LENGTH) * 37 % 256
    expected = model(idx_BT)
    with torch.autocast(device.type, dtype=dtype):
        actual = model(idx_BT).float()
    error = float((actual - expected).norm() / expected.norm())
    return "" if error <= _HALF_TOLERANCE else f"differs by {error:.1e} of the norm"


@torch.no_grad()
def _long_context(config: Config, device: torch.device, length: int) -> str:
    """Compare decoding of the last token of a long sequence with the full forward pass."""
    options = _options(config)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, length, 64, generator=generator).to(device)

    q_BNTH = random(4)
    raw: dict[str, KeyValue] = {name: (random(2), random(2)) for name in BRANCHES}

    def blocks(tokens: dict[str, KeyValue]) -> KeyValue:
        k, v = tokens["compressed"]
        return compress_blocks(k, options, None), compress_blocks(v, options, None)

    keys = BranchKeyValues(blocks(raw), raw["selected"], raw["window"])
    whole = attend_branches(q_BNTH, keys, options, 0)
    cache = NsaCache(options, 0)
    cache.add({n: (k[:, :, :-1], v[:, :, :-1]) for n, (k, v) in raw.items()}, blocks)
    cache.position = length - 1
    last = cache.add({n: (k[:, :, -1:], v[:, :, -1:]) for n, (k, v) in raw.items()}, blocks)
    single = cache.attend(q_BNTH[:, :, -1:], last)
    for name, all_BNTH, one_BNTH in zip(BRANCHES, whole, single, strict=True):
        if not all_BNTH.isfinite().all():
            return f"{name}: non-finite output"
        difference = _difference(one_BNTH, all_BNTH[:, :, -1:], _FP32_TOLERANCE)
        if difference:
            return f"{name}: {difference}"
    return ""
