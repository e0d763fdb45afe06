"""The Triton kernels, in Triton's interpreter on the CPU.

The interpreter computes products of bfloat16 wrongly, so fp32 and fp16 are tested. It runs in a process
of its own: triton reads the variable that enables the interpreter when it is imported.
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
    # Half of the queries belong to the last of two blocks: nsa-quickstart, nsa-125m-production, and
    # heads twice as wide.
    (12, 1094, 2, 32, 64, 16),
    (12, 582, 6, 64, 64, 8),
    (12, 1094, 6, 128, 64, 16),
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


RANK = """
import sys
from dataclasses import replace
import torch
from gpt2.nsa import kernels
from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import rank_compressed
from tests.gpt2.nsa.test_fused import OPTIONS, all_pairs

dtype = getattr(torch, sys.argv[1])
first, queries, group, width, compress, stride, size, count = map(int, sys.argv[2:])
options = replace(OPTIONS, compress=compress, stride=stride, select=size, count=count)
generator = torch.Generator().manual_seed(0)
keys = options.compressed(first + queries)
q, k = (
    torch.randn(1, heads, length, width, generator=generator).to(dtype)
    for heads, length in ((3 * group, queries), (3, keys))
)
if keys:
    # The first head has equal scores for all blocks, and the second a key that is not a number.
    q[:, :group] = 0
    k[0, 1, keys // 3] = torch.nan
sight = MaskSpec(queries, keys, first, compress, stride)
lse = torch.full(q.shape[:3], -torch.inf)
if keys:
    lse = all_pairs(q.double(), k.double(), k.double(), sight, 0.3)[1].float()
q_BKTgH = q.unflatten(1, (3, group)).transpose(2, 3)
found = kernels.rank_blocks(q_BKTgH, k, lse, sight, 0.3, size, count)
right = rank_compressed((q.double() * 0.3).unflatten(1, (3, group)), k.double(), options, first)
assert torch.equal(found, right), (found - right).nonzero()
"""
# First token, queries, query heads of a key head, width, l, d, l', n.
RANKINGS = [
    (95, 2, 6, 20, 4, 2, 4, 12),
    (0, 9, 1, 16, 2, 2, 2, 20),
    (43, 3, 2, 16, 8, 2, 8, 3),
    (570, 12, 6, 64, 32, 16, 64, 8),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", RANKINGS, ids=str)
def test_selects_the_blocks_of_the_cpu(shape, dtype):
    """Also for equal scores, a NaN, more blocks than one tile, and fewer than n."""
    run(RANK, True, dtype, *map(str, shape))
