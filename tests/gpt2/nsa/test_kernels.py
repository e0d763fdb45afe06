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
from gpt2.nsa import fused, lists
from tests.gpt2.nsa.test_backends import by_formula, selection

# Several segments for the blocks that many queries select, several chunks of queries, and of tiles.
fused.SEGMENT = lists.SEGMENT = 8
lists.PARTIAL_BYTES, lists.TILE_QUERIES = 1 << 16, 5
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

def attend(*qkv):
    by_token = (x.transpose(1, 2) for x in qkv)
    return fused.attend_blocks(*by_token, blocks, size, 0.2).transpose(1, 2)

found = run(attend, dtype)
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
import math
import sys
from dataclasses import replace
import torch
from gpt2.nsa import fused
from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import chosen_blocks
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
q_BTKgH = q.transpose(1, 2).unflatten(2, (3, group))
lse = all_pairs(q.double(), k.double(), k.double(), sight, 0.3)[1]
logsums = (lse / math.log(2)).float().transpose(1, 2).unflatten(2, (3, group)).contiguous()
found = fused.rank_blocks(q_BTKgH, k.transpose(1, 2), logsums, sight, 0.3, size, count)
ranking = (q.double() * 0.3).unflatten(1, (3, group)), (k.double(),)
right = chosen_blocks(*ranking, options, first, 0)
assert torch.equal(found, right), (found - right).nonzero()
"""
# First token, queries, query heads of a key head, width, l, d, l', n.
RANKINGS = [
    (95, 2, 6, 20, 4, 2, 4, 12),
    (0, 9, 1, 16, 2, 2, 2, 20),
    (43, 3, 2, 16, 8, 2, 8, 3),
    (570, 12, 6, 64, 32, 16, 64, 8),
    (140, 3, 2, 16, 2, 2, 2, 5),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", RANKINGS, ids=str)
def test_selects_the_blocks_of_the_cpu(shape, dtype):
    """Also for equal scores, a NaN, more blocks than one tile, and fewer than n."""
    run(RANK, True, dtype, *map(str, shape))


BAND = """
import json
import sys
import torch
from gpt2.nsa import fused
from gpt2.nsa.query_major import MaskSpec
from tests.gpt2.nsa.test_fused import all_pairs, band

dtype = getattr(torch, sys.argv[1])
first, queries, group, width, size, stride, window = map(int, sys.argv[2:])
keys = MaskSpec(queries, first + queries, first, size, stride).complete(first + queries)
sight = MaskSpec(queries, keys, first, size, stride, window or None)
generator = torch.Generator().manual_seed(0)
sizes = ((2, queries, 3, group, width), (2, keys, 3, width), (2, keys, 3, width))
qkv = [torch.randn(each, generator=generator).to(dtype) for each in sizes]
dcontext = torch.randn(sizes[0], generator=generator).to(dtype)

def run(attend, wide):
    leaves = [x.to(wide).requires_grad_() for x in qkv]
    context, logsums = attend(*leaves, sight, 0.2)
    # Rows without a key have no log-sum.
    logsums = logsums.where(context.abs().sum(-1) > 0, 0)
    return [context, logsums, *torch.autograd.grad(context, leaves, dcontext.to(wide))]

found, right = run(fused.attend_band, dtype), run(band, torch.float64)
pairs = [(x.detach().double(), y.detach()) for x, y in zip(found, right)]
print(json.dumps([float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in pairs]))
"""
# First token, queries, query heads of a key head, width, tokens of a key, stride, window (0: none).
BANDS = [
    (0, 40, 2, 16, 1, 1, 7),
    (0, 150, 3, 16, 1, 1, 70),
    (13, 29, 1, 32, 8, 4, 0),
    (3, 200, 16, 16, 2, 2, 0),
    (64, 1, 4, 16, 1, 1, 9),
    (0, 5, 2, 16, 8, 4, 0),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", BANDS, ids=str)
def test_bands_equal_the_formula(shape, dtype):
    """Windows and compressed blocks, also before the first complete block."""
    errors = json.loads(run(BAND, True, dtype, *map(str, shape)))
    assert len(errors) == 5 and max(errors) <= TOLERANCES[dtype]
