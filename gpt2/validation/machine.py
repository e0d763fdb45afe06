"""``make validate-machine``: native sparse attention on the present device, by both backends.

B batch, T tokens, V vocabulary, N heads, K key/value heads, H head dim.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.ablation.resolve import resolve_config
from gpt2.attention.nsa.backend import resolve_backend
from gpt2.attention.nsa.cache import Keys, NsaCache, Pair
from gpt2.attention.nsa.compress import compress
from gpt2.attention.nsa.module import attend_branches
from gpt2.attention.nsa.options import BRANCHES, NsaOptions
from gpt2.check.fill import fill
from gpt2.config import Config
from gpt2.model import GPT
from lib.binding import Value
from lib.errors import PreflightError
from lib.kconfig import Layer, Tree

BACKENDS = ("blocks", "gather")
_SMALL: dict[str, Value] = {
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
# The reference goes query by query: five blocks, of which four are selected.
_COMPARED = 29
# In float64, relative to the largest logit.
_EXACT = 1e-9
# Of fp32: the same, where sums come in another order. Of half types: relative to the norm.
_FP32, _HALF = 1e-3, 2e-2
# Tokens of the long context: in short, with FULL=1 on a CPU, and on a GPU.
_LONG, _FULL_CPU, _FULL_GPU = 1024, 8192, 65536


@dataclass(frozen=True)
class Row:
    """One property of one backend: PASS, FAIL, or ABSENT where this device has it not."""

    check: str
    backend: str
    state: str
    seconds: float
    detail: str


def validate(device: torch.device, full: bool) -> list[Row]:
    """All properties; ``full`` takes the long context at its full length."""
    checks: dict[str, Callable[[Config, torch.device], str]] = {
        "float64 reference": _parity,
        "causality": _causality,
        "decode = prefill": _decode,
        "bfloat16": lambda config, device: _narrow(config, device, torch.bfloat16),
        "float16": lambda config, device: _narrow(config, device, torch.float16),
    }
    length = _LONG
    if full:
        length = _FULL_CPU if device.type == "cpu" else _FULL_GPU
    checks[f"{length} tokens"] = lambda config, device: _long(config, device, length)
    return [
        _row(name, check, backend, device) for backend in BACKENDS for name, check in checks.items()
    ]


def to_markdown(rows: list[Row]) -> str:
    """A line for each."""
    lines = [
        f"| {r.check} | {r.backend} | {r.state} | {r.seconds:.1f} | {r.detail} |" for r in rows
    ]
    head = ["| check | backend | | seconds | |", "|---|---|---|---:|---|"]
    return "\n".join([*head, *lines]) + "\n"


def _row(
    name: str, check: Callable[[Config, torch.device], str], backend: str, device: torch.device
) -> Row:
    settings = _SMALL | {f"NSA_BACKEND_{backend.upper()}": True}
    config = resolve_config(Tree(), [Layer.of("validation", "make validate-machine", settings)])
    started = time.perf_counter()
    try:
        resolve_backend(_options(config), device.type)
        wrong = check(config, device)
    except (PreflightError, NotImplementedError) as error:
        return Row(name, backend, "ABSENT", time.perf_counter() - started, str(error))
    return Row(name, backend, "FAIL" if wrong else "PASS", time.perf_counter() - started, wrong)


def _options(config: Config) -> NsaOptions:
    options = config.model.attention.pattern
    assert isinstance(options, NsaOptions)
    return options


def _model(config: Config, device: torch.device, dtype: torch.dtype = torch.float64) -> GPT:
    """No parameter is zero."""
    model = GPT(config.model)
    model.init_weights(config.seed)
    fill(model.double())
    return model.to(device, dtype).eval()


def _tokens(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, _LENGTH), generator=generator).to(device)


def _apart(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """By how much, where it is too much."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return "" if error <= tolerance else f"differs by {error:.1e} of the largest"


def _parity(config: Config, device: torch.device) -> str:
    """Logits and the gradient of every parameter."""
    model, idx_BT = _model(config, device), _tokens(device)[:1, :_COMPARED]
    parameters = {n: p.detach().cpu().requires_grad_() for n, p in model.named_parameters()}
    wanted = reference.gpt(idx_BT.cpu(), parameters, config.model, [None] * len(model.h))
    found = model(idx_BT)
    if wrong := _apart(found, wanted, _EXACT):
        return wrong
    mine, its = (
        torch.autograd.grad(logits.square().mean(), list(leaves), materialize_grads=True)
        for logits, leaves in ((found, model.parameters()), (wanted, parameters.values()))
    )
    for name, slope, right in zip(parameters, mine, its, strict=True):
        if wrong := _apart(slope, right, _EXACT):
            return f"gradient of {name}: {wrong}"
    return ""


@torch.no_grad()
def _causality(config: Config, device: torch.device) -> str:
    model, idx_BT = _model(config, device), _tokens(device)
    before = model(idx_BT)
    for t in (1, _LENGTH // 2, _LENGTH - 7):
        changed_BT = idx_BT.clone()
        changed_BT[:, t:] = (changed_BT[:, t:] + 101) % 256
        wrong = _apart(model(changed_BT)[:, :t], before[:, :t], _EXACT)
        if wrong:
            return f"token {t}: {wrong}"
    return ""


@torch.no_grad()
def _decode(config: Config, device: torch.device) -> str:
    """A prompt that ends within a block, then one token at a time."""
    model, idx_BT = _model(config, device), _tokens(device)
    cache = model.new_cache()
    parts = idx_BT.split([13, *[1] * (_LENGTH - 13)], 1)
    return _apart(torch.cat([model.decode(x, cache) for x in parts], 1), model(idx_BT), _EXACT)


@torch.no_grad()
def _narrow(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Under autocast, against fp32."""
    model, idx_BT = _model(config, device, torch.float32), _tokens(device)
    wanted = model(idx_BT)
    with torch.autocast(device.type, dtype=dtype):
        found = model(idx_BT).float()
    error = float((found - wanted).norm() / wanted.norm())
    return "" if error <= _HALF else f"differs by {error:.1e} of the norm"


@torch.no_grad()
def _long(config: Config, device: torch.device, length: int) -> str:
    """The last token of a long sequence: by itself from a cache, and with all others."""
    options = _options(config)
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, length, 64, generator=generator).to(device)

    q_BNTH = drawn(4)
    raw: dict[str, Pair] = {name: (drawn(2), drawn(2)) for name in BRANCHES}

    def blocks(tokens: dict[str, Pair]) -> Pair:
        k, v = tokens["compressed"]
        return compress(k, options, None), compress(v, options, None)

    keys = Keys(blocks(raw), raw["selected"], raw["window"])
    whole = attend_branches(q_BNTH, keys, options, 0)
    cache = NsaCache(options, 0)
    cache.add({n: (k[:, :, :-1], v[:, :, :-1]) for n, (k, v) in raw.items()}, blocks)
    cache.position = length - 1
    last = cache.add({n: (k[:, :, -1:], v[:, :, -1:]) for n, (k, v) in raw.items()}, blocks)
    single = cache.attend(q_BNTH[:, :, -1:], last)
    for name, all_BNTH, one_BNTH in zip(BRANCHES, whole, single, strict=True):
        if not all_BNTH.isfinite().all():
            return f"{name}: not finite"
        wrong = _apart(one_BNTH, all_BNTH[:, :, -1:], _FP32)
        if wrong:
            return f"{name}: {wrong}"
    return ""
