"""Attention by the Triton kernels of ``triton_kernels.py``, with hand-written derivatives.

One launch computes the outputs, and one row statistic of the same softmax; two launches compute all
gradients. One more computes the mean of the weights over heads.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, H head dim.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from gpt2.attention.backends import MIN_TILE_CAPABILITY, Place
from lib.errors import Problem, RunError

LOG2_E = math.log2(math.e)


class TileSpec(NamedTuple):
    """Scores, statistic and dropout of a pass.

    Scores are products times ``scale``; row i sees i − ``window`` < j ≤ i. In pairs with i − j ≤
    ``band``, the score of the transposed pair is added, times ``alpha`` (None: one learnable factor
    per head). ``statistic`` is "" (none), entropy, rms, or topk: the sum of the ``top`` largest
    weights. ``dropout`` acts on the weights that multiply the values.
    """

    window: int
    scale: float
    band: int = -1
    alpha: float | None = 0.0
    statistic: str = ""
    top: int = 1
    dropout: float = 0.0


class TileOutputs(NamedTuple):
    """Head outputs BNTH, the statistic BNT, and the mean over heads of the weights, BTS in fp32."""

    context_BNTH: Tensor | None
    statistic_BNT: Tensor | None
    mean_BTS: Tensor | None


# Launches a kernel, given its name, the specification, and the tensors by name; None if absent.
TileLaunch = Callable[[str, TileSpec, Mapping[str, Tensor | None]], None]


def tiled_attention(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor | None,
    alpha_N: Tensor | None,
    factor_BNT: Tensor | None,
    sink_N: Tensor | None,
    spec: TileSpec,
    launch: TileLaunch,
    mean: bool = False,
    learns_mean: bool = True,
) -> TileOutputs:
    """Return differentiable outputs, without values no head outputs. ``factor_BNT``, in fp32,
    multiplies the scores of rows; ``sink_N`` are logits beside them. ``mean``: also the mean
    weights, with a gradient if ``learns_mean``.
    """
    outputs = _TiledAttention.apply(
        launch, spec, mean, learns_mean, q_BNTH, k_BKTH, v_BKTH, alpha_N, factor_BNT, sink_N
    )
    return TileOutputs(*outputs)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        launch: TileLaunch,
        spec: TileSpec,
        mean: bool,
        learns_mean: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        alpha: Tensor | None,
        factor: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.launch, ctx.spec, ctx.learns_mean = launch, spec, learns_mean
        ctx.set_materialize_grads(False)
        batch, heads, length, _ = q.shape

        def rows(present: bool = True) -> Tensor | None:
            sizes = batch, heads, length
            return q.new_empty(sizes, dtype=torch.float32) if present else None

        drops = v is not None and spec.dropout > 0
        tensors = {
            "q": _rows_of_vectors(q),
            "k": _rows_of_vectors(k),
            "v": None if v is None else _rows_of_vectors(v),
            "alphas": alpha,
            "sinks": sink,
            "factor": None if factor is None else factor.contiguous(),
            # Drawn on the device, so that the host does not wait for it.
            "seed": torch.randint(1 << 62, (1,), device=q.device) if drops else None,
            "context": None if v is None else _token_major(q),
            "logsum": rows(),
            "statistic": rows(spec.statistic != ""),
            "edge": rows(spec.statistic == "topk"),
            "share": rows(spec.statistic == "topk"),
        }
        launch("forward", spec, tensors)
        shown = None
        if mean:
            shown = q.new_empty(batch, length, length, dtype=torch.float32)
            names = "q", "k", "alphas", "factor", "logsum"
            launch("mean_weights", spec, {n: tensors[n] for n in names} | {"mean": shown})
        ctx.names = list(tensors)
        ctx.save_for_backward(*tensors.values())
        return tensors["context"], tensors["statistic"], shown

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dcontext: Tensor | None, dstatistic: Tensor | None, dmean: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved: dict[str, Any] = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        q, k, v, alpha, factor = (saved[name] for name in ("q", "k", "v", "alphas", "factor"))
        sink = saved["sinks"]
        context, rows = saved.pop("context"), saved["logsum"]
        if not ctx.learns_mean:
            # A compiled graph has a gradient of zeros, which would cost a pass over the scores.
            dmean = None
        if dcontext is None and v is not None:
            dcontext = torch.zeros_like(context)
        if dcontext is not None:
            dcontext = dcontext.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        banded = ctx.spec.band >= 0
        shared = saved | {
            "dcontext": dcontext,
            "slope": None if dstatistic is None else dstatistic.contiguous(),
            "dmean": None if dmean is None else dmean.contiguous(),
            "deltas": torch.empty_like(rows),
            # Sums over columns, to which the second kernel adds the sums over rows of the band.
            "dq_rows": _token_major(q, torch.float32) if banded else None,
            "dk_rows": _token_major(q, torch.float32) if banded else None,
        }
        dq, dk, dv = (None if x is None else _token_major(x) for x in (q, k, v))
        dfactor, dalphas, dsinks = (
            None if x is None else torch.empty_like(rows) for x in (factor, alpha, sink)
        )
        by_row = {"context": context, "dfactor": dfactor, "dalphas": dalphas, "dsinks": dsinks}
        complete = {"dq": dq}
        ctx.launch("row_gradients", ctx.spec, shared | by_row | ({} if banded else complete))
        by_column = {"dk": dk, "dv": dv}
        ctx.launch("column_gradients", ctx.spec, shared | by_column | (complete if banded else {}))
        dalpha = None if dalphas is None else dalphas.sum((0, 2)).to(alpha.dtype)
        dsink = None if dsinks is None else dsinks.sum((0, 2)).to(sink.dtype)
        return None, None, None, None, dq, dk, dv, dalpha, dfactor, dsink


def _rows_of_vectors(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _token_major(x_BNTH: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of the shape, BTNH in memory as the output projection reads it."""
    batch, heads, length, width = x_BNTH.shape
    return x_BNTH.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def tile_problem(dtype: torch.dtype, device: torch.device) -> Problem | None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    fix, code = "type: SET=ATTENTION_BACKEND_ROWS=y", "gpu.unsupported"
    if importlib.util.find_spec("triton") is None:
        what, code = "the package is missing", "env.missing-package"
        fix = f"type: make setup EXTRAS=triton, or {fix.removeprefix('type: ')}"
    elif dtype == torch.float64:
        what = "no kernel for float64 (expected fp32, fp16 or bf16)"
    elif device.type == "cpu" and not interpreted:
        what = "no kernel for a CPU (expected a GPU)"
    else:
        return None
    return Problem(f"triton: {what}", "ATTENTION_BACKEND", fix, code=code)


# Does not change, and torch.compile need not look into it.
@torch.compiler.assume_constant_result
def runs_tiles(device: torch.device) -> bool:
    """Return whether the device is a GPU of a compute capability that the kernels support."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    major = torch.cuda.get_device_capability(device)[0]
    return bool(torch.version.hip) or major >= MIN_TILE_CAPABILITY


def place_of(device: torch.device, dtype: torch.dtype) -> Place:
    if device.type != "cuda":
        return "cpu"
    kernels = runs_tiles(device) and dtype != torch.float64
    return "gpu" if kernels else "gpu without kernels"


# Tensors that a kernel writes, by its name.
_WRITTEN: Mapping[str, frozenset[str]] = {
    "forward": frozenset({"context", "logsum", "statistic", "edge", "share"}),
    "mean_weights": frozenset({"mean"}),
    "row_gradients": frozenset(
        {"dq", "deltas", "dq_rows", "dk_rows", "dfactor", "dalphas", "dsinks"}
    ),
    "column_gradients": frozenset({"dq", "dk", "dv"}),
}


def triton_launch(name: str, spec: TileSpec, tensors: Mapping[str, Tensor | None]) -> None:
    """Launch a Triton kernel, outside of torch.compile's view. Raises RunError if it cannot run."""
    present = {key: x for key, x in tensors.items() if x is not None}
    if not torch.compiler.is_compiling():
        _launch(name, spec, present)
        return
    read, written = (
        [key for key in present if (key in _WRITTEN[name]) == writes] for writes in (False, True)
    )
    tensors_read, tensors_written = ([present[key] for key in keys] for keys in (read, written))
    _launch_operator(name, ",".join([*read, *written]), tensors_read, tensors_written, *spec)


def _launch(name: str, spec: TileSpec, tensors: Mapping[str, Tensor]) -> None:
    q = tensors["q"]
    if problem := tile_problem(q.dtype, q.device):
        raise RunError(problem)
    kernel, grid, arguments = launch_arguments(name, spec, tensors)
    kernel[grid](**arguments)


def triton_largest(weights: Tensor, k: int) -> Tensor | None:
    """Return the k largest elements of the last dimension; None if no kernel computes them here."""
    if weights.dtype != torch.float32 or not runs_tiles(weights.device):
        return None
    try:
        from gpt2.attention.largest import LARGEST_WIDTH, largest_values
    except ImportError:
        return None
    return largest_values(weights, k) if weights.shape[-1] <= LARGEST_WIDTH else None


# Written out: the types that torch derives a schema from differ among its versions.
_SCHEMA = "(str name, str names, Tensor[] read, Tensor(a!)[] written, int window, float scale, int band, float? alpha, str statistic, int top, float dropout) -> ()"


@library.custom_op("kablate::launch_tiles", mutates_args={"written"}, schema=_SCHEMA)
def _launch_operator(
    name: str, names: str, read: list[Tensor], written: list[Tensor], *spec: Any
) -> None:
    """Launch a kernel from a compiled graph, with the fields of the specification one by one."""
    tensors = dict(zip(names.split(","), [*read, *written], strict=True))
    _launch(name, TileSpec(*spec), tensors)


def launch_arguments(
    name: str, spec: TileSpec, tensors: Mapping[str, Tensor | None]
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """Return a kernel, its grid and its arguments. Raises RunError without the module of kernels."""
    q, k = tensors["q"], tensors["k"]
    assert q is not None and k is not None
    try:
        from gpt2.attention import tile_sizes
        from gpt2.attention import triton_kernels as kernels
    except ImportError as error:
        what = "the kernels are not part of an exported model"
        fix = 'set the backend of attention to "rows" in config.json'
        raise RunError(Problem(what, next=fix, code="gpu.unsupported")) from error

    kernel = kernels.KERNELS[name]
    batch, heads, length, width = q.shape
    heads_of = [(each, tensors.get(each)) for each in ("q", "k", "v")]
    # A statistic without a gradient does not affect the gradients.
    counted = name == "forward" or tensors.get("slope") is not None
    mode = kernels.MODES[spec.statistic] if counted else 0
    slopes = mode > 0 or tensors.get("dmean") is not None
    launch = tile_sizes.launch_constants(name, q.dtype, width, spec.top, slopes)
    window, band = min(spec.window, length), min(spec.band, length)
    # A word of Philox is uniform in −2³¹ ≤ word < 2³¹; a share of ``dropout`` is below this.
    threshold = min(round(spec.dropout * 2**32), 2**32 - 1) - 2**31
    arguments: dict[str, Any] = {
        **tensors,
        **{each: kernels.Heads(x, *(k if x is None else x).stride()[:3]) for each, x in heads_of},
        "score": kernels.Scores(spec.scale * LOG2_E, window, band, spec.alpha or 0.0),
        "drop": kernels.Dropout(tensors.get("seed"), 1 / (1 - spec.dropout), threshold),
        "row": kernels.PerRow(*(tensors.get(field) for field in kernels.PerRow._fields)),
        "T": length,
        "N": heads,
        "g": heads // k.shape[1],
        "H": width,
        "n": spec.top,
        "MODE": mode,
        "BAND": spec.band >= 0,
    }
    arguments = {each: arguments.get(each) for each in kernel.arg_names} | launch
    tiles = {side: -(-length // launch[side]) for side in ("M", "C")}
    grids = {
        "forward": (tiles["M"], heads),
        "row_gradients": (tiles["M"], heads),
        "column_gradients": (tiles["C"], k.shape[1]),
        "mean_weights": (tiles["M"], tiles["C"]),
    }
    return kernel, (*grids[name], batch), arguments
