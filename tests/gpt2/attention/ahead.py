"""The Triton kernels on a machine without their GPU: compiled for it.

    TRITON_INTERPRET=0 python -m tests.gpt2.attention.ahead ARCHITECTURE TYPE...

Prints a JSON line for each kernel of each shape of native sparse attention, and of each case of
``triton.py``: shared memory, registers, and the bytes that a thread spills.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from gpt2.attention.attention import attend_tiles
from gpt2.attention.rows import AttentionPlan
from gpt2.attention.triton import TileSpec, launch_arguments
from gpt2.nsa import fused
from gpt2.nsa.kernels import KERNELS
from gpt2.nsa.query_major import MaskSpec
from gpt2.running.kernel_checks import attention_pass, probe_plan
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree

# g, H, l' and n: of nsa-quickstart, of nsa-125m-production, and heads twice as wide.
SHAPES = ((2, 32, 64, 16), (6, 64, 64, 8), (6, 128, 64, 16))
_COMPRESS, _STRIDE = 32, 16
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_TERM: dict[str, SymbolValue] = {"RECIPROCAL": True}
# As in the step ``full``, with the gradient of the weights that the MLP reads.
_ALL = _TERM | {
    "RA_CROSS_TOKEN": True,
    "RA_CROSS_TOKEN_TOPK": 8,
    "MLP_CROSS_TOKEN": True,
    "MLP_CROSS_TOKEN_DETACH_WEIGHTS": False,
}
_SINK: dict[str, SymbolValue] = {"RA_CROSS_TOKEN": True, "RA_CROSS_TOKEN_MODE_ENTROPY": True}
_SINK |= {"ATTENTION_SINK": True}
# Name and head dim → settings, of the kernels of ``triton.py``.
TILE_CASES: Mapping[tuple[str, int], dict[str, SymbolValue]] = {
    ("ra", 64): _TERM,
    ("all", 64): _ALL,
    ("all on scores", 64): _ALL | {"RA_CROSS_TOKEN_APPLY_WEIGHTS": True},
    ("sink", 64): _TERM | _SINK,
    ("all", 128): _ALL,
}
_COMPILED_TOKENS = 1024


def compiled_rows(architecture: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the resources of every kernel and shape, compiled for an architecture such as sm_90."""
    if architecture.startswith("sm_"):
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    else:
        # Wavefronts have 64 threads before RDNA.
        target = GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    known = {"type": dtype, "target": architecture}
    triton.runtime.driver.set_active(_AbsentDriver(target))
    for shape in SHAPES:
        for name, compiled in _launched_sparse(shape, dtype):
            yield known | {"kernel": name, "shape": shape} | _used(compiled)
    for case in TILE_CASES:
        for name, compiled in _launched_tiles(case, dtype):
            yield known | {"kernel": name, "shape": case} | _used(compiled)


@dataclass(frozen=True)
class _AbsentDriver:
    """Driver for compilation only."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _launched_tiles(case: tuple[str, int], dtype: str) -> list[tuple[str, Any]]:
    """Return every kernel that a pass launches, forward and backward, compiled as for the launch."""
    compiled: list[tuple[str, Any]] = []

    def launch(name: str, spec: TileSpec, tensors: Mapping[str, Tensor | None]) -> None:
        kernel, grid, arguments = launch_arguments(name, spec, tensors)
        # The first pass of a gate that scales scores.
        first = spec.statistic and "v" in tensors and tensors["v"] is None
        label = f"{name}, no values" if first else name
        compiled.append((label, kernel.warmup(grid=grid, **arguments)))

    plan = _tile_plan(case, torch.float32)
    qkv = [torch.zeros(1, 2, _COMPILED_TOKENS, case[1], dtype=_TYPES[dtype])] * 3
    attention_pass(attend_tiles, replace(plan, dropout=0.1, tile_launch=launch), qkv)
    return compiled


def _used(compiled: Any) -> dict[str, int]:
    registers, spilled = _resources(compiled.asm)
    shared = compiled.metadata.shared
    return {"shared_bytes": shared, "registers": registers, "spilled_bytes": spilled}


def _launched_sparse(shape: tuple[int, ...], dtype: str) -> list[tuple[str, Any]]:
    """Return every kernel that the branches launch, forward and backward, compiled."""
    group, width, size, count = shape
    compiled: list[tuple[str, Any]] = []

    def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        compiled.append((name, KERNELS[name].warmup(*arguments, grid=grid, **constants)))

    length = count * size
    q = torch.zeros(1, length, 1, group, width, dtype=_TYPES[dtype], requires_grad=True)
    k = torch.zeros(1, length, 1, width, dtype=_TYPES[dtype], requires_grad=True)
    keys = MaskSpec(length, length, 0, _COMPRESS, _STRIDE).complete(length)
    with patch.object(fused, "run", launch):
        sights = MaskSpec(length, keys, 0, _COMPRESS, _STRIDE), MaskSpec(
            length, length, 0, window=99
        )
        for sight in sights:
            context, logsums = fused.attend_band(
                q, k[:, : sight.keys], k[:, : sight.keys], sight, 1.0
            )
            context.sum().backward()
        blocks = fused.rank_blocks(q, k[:, :keys], logsums, sights[0], 1.0, size, count)
        fused.attend_blocks(q, k, k, torch.zeros_like(blocks), size, 1.0).sum().backward()
    return compiled


def _resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Return the registers and the spilled bytes of a thread, as the compiler's tools report them."""
    if "cubin" in asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
            figures = dict(re.findall(r"(REG|STACK):(\d+)", text.stdout))
            return int(figures["REG"]), int(figures["STACK"])
    figures = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", asm["amdgcn"]))
    return int(figures["vgpr_count"]), int(figures["private_segment_fixed_size"])


def _tile_plan(case: tuple[str, int], dtype: torch.dtype) -> AttentionPlan:
    sizes: dict[str, SymbolValue] = {
        "MODEL_SIZE_CUSTOM": True,
        "N_HEAD": 2,
        "N_EMBD": 2 * case[1],
        "DROPOUT": "0.0",
    }
    layer = ConfigLayer.of("test", "test", TILE_CASES[case] | sizes)
    model = resolve_config(KconfigTree(), [layer]).model
    return probe_plan(model, _COMPILED_TOKENS, torch.device("cpu"), dtype)


def main() -> None:
    """Print the rows of an architecture and types."""
    architecture, *types = sys.argv[1:]
    for dtype in types:
        for row in compiled_rows(architecture, dtype):
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
