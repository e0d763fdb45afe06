"""``make validate-machine``: check native sparse attention on the present device, by both backends.

With ``GPU=`` the Triton kernels are checked for GPUs that are absent: in Triton's interpreter, and
compiled.

B batch, T tokens, V vocabulary, N heads, K key/value heads, H head dim.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gpt2 import reference
from gpt2.ablation.resolve import resolve_config
from gpt2.attention.kernels import TOLERANCES, compare_values
from gpt2.attention.sdpa import DTYPES
from gpt2.check.subject import fill_parameters
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.nsa.cache import BranchKeyValues, KeyValue, NsaCache
from gpt2.nsa.fused import attend_fused, gpu_kernels
from gpt2.nsa.module import attend_branches, compress_blocks
from gpt2.nsa.options import BRANCHES, NsaOptions, resolve_backend
from gpt2.shape import ModelShape
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.gpu import ARCHITECTURES, find_gpu, usable_cores
from lib.env.options import MachineConfig
from lib.env.python_env import release
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, PreflightError, Problem, RunError
from lib.project import python_module_command
from lib.report.render import json_document, markdown_table
from lib.units import format_duration

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


@dataclass(frozen=True)
class ValidationRow:
    """Result of one check of one backend: PASS, FAIL, or ABSENT if the device cannot run it."""

    check: str
    backend: str
    state: str
    seconds: float
    detail: str


def validate_device(device: torch.device, full: bool) -> list[ValidationRow]:
    """Run all checks of both backends on ``device``; ``full`` uses the full long context."""
    checks: dict[str, Callable[[Config, torch.device], str]] = {
        "float64 reference": _parity,
        "causality": _causality,
        "decode = prefill": _decode,
        "bfloat16": lambda config, device: _half_precision(config, device, torch.bfloat16),
        "float16": lambda config, device: _half_precision(config, device, torch.float16),
    }
    length = _LONG_CONTEXT
    if full:
        length = _FULL_CONTEXT_CPU if device.type == "cpu" else _FULL_CONTEXT_GPU
    checks[f"{length} tokens"] = lambda config, device: _long_context(config, device, length)
    return [
        _row(name, check, backend, device) for backend in BACKENDS for name, check in checks.items()
    ]


def to_markdown(rows: list[ValidationRow]) -> str:
    """Return the results as a Markdown table, one line per row, and the reasons below it."""
    cells = ((r.check, r.backend, r.state, f"{r.seconds:.1f}") for r in rows)
    table = markdown_table(("check", "backend", "", "seconds"), cells, left=(0, 1, 2))
    # A backend that cannot run has the same reason in every row.
    reasons = dict.fromkeys((r.state, " ".join(r.detail.split())) for r in rows if r.detail)
    return table + "".join(f"\n{state}: {reason}\n" for state, reason in reasons)


def _row(
    name: str, check: Callable[[Config, torch.device], str], backend: str, device: torch.device
) -> ValidationRow:
    settings = _SMALL | {f"NSA_BACKEND_{backend.upper()}": True}
    config = resolve_config(
        KconfigTree(), [ConfigLayer.of("validation", "make validate-machine", settings)]
    )
    started = time.perf_counter()
    try:
        resolve_backend(_options(config), device.type)
        failure = check(config, device)
    except (PreflightError, NotImplementedError) as error:
        return ValidationRow(name, backend, "ABSENT", time.perf_counter() - started, str(error))
    state = "FAIL" if failure else "PASS"
    return ValidationRow(name, backend, state, time.perf_counter() - started, failure)


def _options(config: Config) -> NsaOptions:
    options = config.model.attention.pattern
    assert isinstance(options, NsaOptions)
    return options


def _model(config: Config, device: torch.device, dtype: torch.dtype = torch.float64) -> GPT:
    """Build a model in which no parameter is zero."""
    model = GPT(config.model)
    model.init_weights(config.seed)
    fill_parameters(model.double())
    return model.to(device, dtype).eval()


def _tokens(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, _LENGTH), generator=generator).to(device)


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Return a description of the relative difference if it exceeds ``tolerance``, else ""."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    error = float((actual - expected).abs().max() / expected.abs().max())
    return "" if error <= tolerance else f"differs by {error:.1e} of the largest"


def _parity(config: Config, device: torch.device) -> str:
    """Compare logits and the gradient of every parameter with the reference."""
    model, idx_BT = _model(config, device), _tokens(device)[:1, :_REFERENCE_LENGTH]
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
def _causality(config: Config, device: torch.device) -> str:
    model, idx_BT = _model(config, device), _tokens(device)
    before = model(idx_BT)
    for t in (1, _LENGTH // 2, _LENGTH - 7):
        changed_BT = idx_BT.clone()
        changed_BT[:, t:] = (changed_BT[:, t:] + 101) % 256
        difference = _difference(model(changed_BT)[:, :t], before[:, :t], _FP64_TOLERANCE)
        if difference:
            return f"token {t}: {difference}"
    return ""


@torch.no_grad()
def _decode(config: Config, device: torch.device) -> str:
    """Decode a prompt that ends within a block, then one token at a time."""
    model, idx_BT = _model(config, device), _tokens(device)
    cache = model.new_cache()
    parts = idx_BT.split([13, *[1] * (_LENGTH - 13)], 1)
    decoded = torch.cat([model.decode(x, cache) for x in parts], 1)
    return _difference(decoded, model(idx_BT), _FP64_TOLERANCE)


@torch.no_grad()
def _half_precision(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Compare autocast to ``dtype`` with fp32."""
    model, idx_BT = _model(config, device, torch.float32), _tokens(device)
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


# Comparison of the fused kernels before a run.


def check_kernels(
    shape: ModelShape, cached: int, options: NsaOptions, machine: MachineConfig
) -> None:
    """Compare the kernels with the gather backend in float64, forward and backward.

    On random tensors of the configured heads; ``cached`` is the number of elements of a token's
    keys and values. Rounding may change the selection of a block, so up to a tenth of the vectors
    of a tensor may differ. Raises PreflightError if the GPU cannot run the kernels, or they differ.
    """
    dtype, device = DTYPES[machine.precision], torch.device(machine.device)
    inputs = [x.to(device, dtype) for x in _probe(shape, cached // (2 * shape.head_dim), options)]

    def fused(q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        kernels = gpu_kernels()
        assert kernels, "the backend triton requires the package"
        return attend_fused(q_BNTH, keys, options, 0, 0, kernels)

    def exact(q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        # Without the choice of a kernel: float64 has none.
        return attend_branches(q_BNTH, keys, options.for_any_device(), 0)

    sizes = f"head dim {shape.head_dim}, blocks of {options.select}"
    what = f"the kernels of NSA on {device} ({dtype}, {sizes})"
    advice = "type: SET=NSA_BACKEND_GATHER=y"
    compare_values(
        partial(_branches, inputs, options, fused, dtype),
        partial(_branches, inputs, options, exact, torch.float64),
        TOLERANCES[dtype],
        device,
        lambda problem, code: PreflightError(
            Problem(f"{what} {problem}", "NSA_BACKEND", advice, code=code)
        ),
        _typical_errors,
    )


def _probe(shape: ModelShape, kv_heads: int, options: NsaOptions) -> Iterator[Tensor]:
    """Draw queries, and the keys and values of each branch, for more blocks than a query selects."""
    tokens = (options.count + 4) * options.select
    length = max(2 * options.compress, 2 * options.window, tokens)
    generator = torch.Generator().manual_seed(0)
    lengths = [options.compressed(length)] * 2 if options.compresses else []
    lengths += [length] * 2 * (options.branch_selected + options.branch_window)
    for heads, count in ((shape.n_head, length), *((kv_heads, count) for count in lengths)):
        yield torch.randn(1, heads, count, shape.head_dim, generator=generator)


def _branches(
    inputs: Sequence[Tensor],
    options: NsaOptions,
    attend: Callable[[Tensor, BranchKeyValues], list[Tensor]],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the outputs of all branches, and the gradients of a combination of them."""
    q_BNTH, *rest = leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    pairs = iter(zip(rest[::2], rest[1::2], strict=True))
    blocks = next(pairs) if options.compresses else None
    keys = BranchKeyValues(
        # Ranking alone needs no values.
        blocks if options.branch_compressed or not blocks else blocks[:1],
        next(pairs) if options.branch_selected else None,
        next(pairs) if options.branch_window else None,
    )
    outputs = attend(q_BNTH, keys)
    total = torch.stack([(out.float() * _direction(out)).sum() for out in outputs]).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in (*outputs, *gradients)]


def _direction(out_BNTH: Tensor) -> Tensor:
    """Return a fixed direction, in which the gradients of a comparison are computed."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out_BNTH.shape, generator=generator).to(out_BNTH.device)


def _typical_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the error that nine tenths of a tensor's vectors do not exceed, per mean norm."""
    found = []
    for a, e in zip(actual, expected, strict=True):
        errors = (a.double() - e).norm(dim=-1).flatten()
        mean = e.norm() / errors.numel() ** 0.5
        found.append(float(errors.quantile(0.9) / mean.clamp_min(torch.finfo(e.dtype).tiny)))
    return found


# The Triton kernels for GPUs that are absent.


# Errors relative to the norm, by type of the interpreted kernels.
_KERNEL_TOLERANCES = {"fp32": 2e-6, "fp16": 2e-3}
_COMPILED_TYPES = ("bf16", "fp32")
_ERRORS = ("blocks", "values", "dq", "dk", "dv")


def validate_kernels(names: str, as_json: bool) -> tuple[int, str]:
    """Check the Triton kernels for GPUs with comma-separated names; return exit code and text.

    Raises ConfigError for an unknown GPU, PreflightError without triton, and RunError if a kernel
    cannot be compiled.
    """
    gpus = {find_gpu(name).name for name in names.split(",")}
    architectures = [name for name, (of, _) in ARCHITECTURES.items() if gpus & of]
    if old := gpus.difference(*(of for of, _ in ARCHITECTURES.values())):
        what = f"GPU: unsupported (expected compute capability 8.0 or later, got {min(old)})"
        raise ConfigError(Problem(what, next="type: GPU=h100", code="gpu.unsupported"))
    rows = kernel_rows(architectures)
    code = EXIT_FAILED if any(row["state"] == "FAIL" for row in rows) else EXIT_DONE
    if as_json:
        return code, json_document(1, {"architectures": architectures, "rows": rows})
    return code, kernels_to_markdown(rows, architectures)


def interpreter_problem() -> Problem | None:
    """Return why Triton's interpreter cannot run here, or None.

    Before triton 3.7, the interpreter converts arrays of one element to integers, which numpy
    refuses from 2.4 on.
    """
    if not find_spec("triton"):
        fix = "type: make setup EXTRAS=triton"
        return Problem("GPU: the package triton is missing", next=fix, code="env.missing-package")
    triton, numpy = _triton_version(), version("numpy")
    if not triton or release(triton) >= (3, 7) or release(numpy) < (2, 4):
        return None
    what = f"GPU: the interpreter of triton {triton} fails with numpy {numpy} (expected below 2.4)"
    fix = f"type: {sys.executable} -m pip install 'numpy<2.4'"
    return Problem(what, next=fix, code="env.missing-package")


def _triton_version() -> str:
    """Return the version of the distribution of triton, whose name on ROCm differs; "" if none."""
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def kernel_rows(architectures: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of ``gpt2.attention.ahead``, each with its ``state``: PASS or FAIL.

    A row fails if an interpreted kernel selects other blocks or exceeds the tolerance, or if a
    compiled one exceeds the shared memory. A kernel that spills registers is slow, not wrong.
    """
    if problem := interpreter_problem():
        raise PreflightError(problem)
    # The longest processes first.
    processes: list[tuple[str, ...]]
    processes = [("1", "interpret", dtype) for dtype in _KERNEL_TOLERANCES]
    processes += [("0", "compile", name, *_COMPILED_TYPES) for name in architectures]
    started, found = time.monotonic(), {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        running = {pool.submit(_ahead, *each): each for each in processes}
        for done in as_completed(running):
            process = running[done]
            found[process] = list(done.result())
            share = len(found) / len(processes)
            left = format_duration((time.monotonic() - started) * (1 / share - 1))
            what = f"{process[1]} {process[2]}: {len(found[process])} rows"
            log("KERNEL", f"{what}, {len(found)} of {len(processes)}, eta {left}")
    rows = [row for process in processes for row in found[process]]
    return [row | {"state": "PASS" if _passes(row) else "FAIL"} for row in rows]


def _passes(row: Mapping[str, Any]) -> bool:
    if "kernel" in row:
        fits: bool = row["shared_bytes"] <= ARCHITECTURES[row["target"]][1]
        return fits
    errors = [row[name] for name in _ERRORS[1:]]
    # Only sparse attention selects blocks.
    return not row.get("blocks") and max(errors) <= _KERNEL_TOLERANCES[row["type"]]


def _ahead(interpret: str, *arguments: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a process, which reads ``TRITON_INTERPRET`` when it imports triton."""
    done = subprocess.run(
        python_module_command("gpt2.attention.ahead", *arguments),
        # The default, of which triton 3.9 warns.
        env={"TRITON_DEFAULT_FP_FUSION": "1", **os.environ, "TRITON_INTERPRET": interpret},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        what = f"gpt2.attention.ahead {' '.join(arguments)}: failed (exit code {done.returncode})"
        raise RunError(Problem(what, code="process.failed"))
    return list(map(json.loads, done.stdout.splitlines()))


def kernels_to_markdown(rows: Sequence[Mapping[str, Any]], architectures: Sequence[str]) -> str:
    """Return a table of the interpreted, and one of the compiled kernels."""
    interpreted = [row for row in rows if "values" in row]
    case = "g, H, l', n; or mechanisms, H"
    heads = [case, "type", "blocks that differ", *_ERRORS[1:], ""]
    cells = [
        [_shape(row), row["type"], f"{row['blocks']:.0%}" if "blocks" in row else "-"]
        + [f"{row[name]:.1e}" for name in _ERRORS[1:]]
        + [row["state"]]
        for row in interpreted
    ]
    text = "Errors relative to the norm, in the interpreter:\n\n"
    text += markdown_table(heads, cells, left=(0, 1))
    text += "\nShared memory of a program in KiB, registers of a thread, bytes that a thread spills:\n\n"
    compiled: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        if "kernel" in row:
            figures = (row["shared_bytes"] / 1024, row["registers"], row["spilled_bytes"])
            key = (row["kernel"], _shape(row), row["type"])
            failed = " FAIL" * (row["state"] == "FAIL")
            cell = "{:.0f}, {}, {}".format(*figures) + failed
            compiled.setdefault(key, {})[row["target"]] = cell
    heads = ["kernel", case, "type", *architectures]
    cells = [[*key, *(cell[name] for name in architectures)] for key, cell in compiled.items()]
    return text + markdown_table(heads, cells, left=(0, 1, 2))


def _shape(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row["shape"]))
