"""The Triton kernels, in Triton's interpreter on the CPU, and compiled for GPUs that are absent.

The interpreter computes products of bfloat16 wrongly, so fp32 and fp16 are tested. Both run in
processes of their own: triton reads the variable that enables the interpreter when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason='needs: make setup EXTRAS="triton"'
    ),
]

INTERPRET = """
import json
import sys
import torch
from gpt2.nsa import kernels
from tests.gpt2.nsa.test_backends import by_formula, selection

# Several segments for the blocks that many queries select.
kernels.SEGMENT = 8
dtype = getattr(torch, sys.argv[1])
queries, tokens, group, width, size, count = map(int, sys.argv[2:])
generator = torch.Generator().manual_seed(0)
blocks = selection(queries, tokens, size, count, touching=False)
sizes = ((1, 2, queries, group, width), (1, 2, tokens, width), (1, 2, tokens, width))
qkv = [torch.randn(each, generator=generator).to(dtype) for each in sizes]
dcontext = torch.randn(sizes[0], generator=generator).to(dtype)

def run(attend, wide):
    leaves = [x.to(wide).requires_grad_() for x in qkv]
    context = attend(*leaves)
    return [context, *torch.autograd.grad(context, leaves, dcontext.to(wide))]

found = run(lambda q, k, v: kernels.attend_blocks(q, k, v, blocks, size, 0.2), dtype)
right = run(lambda q, k, v: by_formula(q * 0.2, k, v, blocks, size), torch.float64)
pairs = [(x.detach().double(), y.detach()) for x, y in zip(found, right)]
print(json.dumps([float((x - y).norm() / y.norm()) for x, y in pairs]))
"""
# Queries, tokens, query heads of a key head, width, tokens of a block, blocks.
SHAPES = [
    (20, 20, 1, 16, 8, 3),
    (41, 41, 6, 20, 6, 4),
    (13, 29, 3, 64, 5, 3),
    (37, 37, 8, 32, 16, 2),
    (9, 9, 12, 128, 1, 3),
]
# Relative to the norm.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3}


def run(script: str, interpreted: bool, *arguments: str) -> str:
    """Run a script in a process, and return what it prints."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(shape, dtype):
    errors = json.loads(run(INTERPRET, True, dtype, *map(str, shape)))
    assert len(errors) == 4 and max(errors) <= TOLERANCES[dtype]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpt2.nsa import kernels

TYPES = {name: "i32" for name in ("T", "S", "BK", "J")} | {"scale": "fp32", "scale2": "fp32"}
TYPES |= {name: "*fp32" for name in ("logsums", "inner", "partial_k", "partial_v")}
TYPES |= {name: "*i32" for name in ("rows", "starts", "segments", "owners")} | {"blocks": "*i64"}
backend, arch, warp, dtype, *sizes = sys.argv[1:]
group, width, size, count = map(int, sizes)
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
sides = kernels._sides(group, width, size)
known = {"g": group, "H": width, "n": count, "size": size, **sides}
known |= {"QUERIES": kernels._queries(sides), "SEGMENT": kernels.SEGMENT}
for kernel, warps in kernels.NUM_WARPS.items():
    constants = {name: value for name, value in known.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*" + dtype)
        for name in kernel.arg_names
    }
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, indices)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    print(kernel.__name__, list(compiled.asm)[-1], compiled.metadata.shared)
"""
# Type of target, architecture, threads of a warp, binary, and bytes of shared memory of a program.
TARGETS = {
    "sm_80": ("cuda", "80", "32", "cubin", 166_912),
    "sm_90": ("cuda", "90", "32", "cubin", 232_448),
    "MI300X": ("hip", "gfx942", "64", "hsaco", 65_536),
    "W7900": ("hip", "gfx1100", "32", "hsaco", 65_536),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [("6", "64", "64", "8"), ("6", "128", "64", "16")], ids=str)
def test_compiles_for_absent_gpus(target, sizes):
    *arguments, binary, limit = TARGETS[target]
    output = run(COMPILE, False, *arguments, "bf16", *sizes)
    lines = [line.split() for line in output.splitlines()]
    assert [name for name, *_ in lines] == [
        "_forward", "_query_gradients", "_key_gradients", "_reduce"
    ]  # fmt: skip
    for _, kind, shared in lines:
        assert kind == binary and int(shared) <= limit
