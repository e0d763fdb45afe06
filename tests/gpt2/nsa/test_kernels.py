"""The Triton kernels, in Triton's interpreter on the CPU.

    TRITON_INTERPRET=1 python -m tests.gpt2.nsa.test_kernels blocks|bands|ranks TYPE

prints the errors of each shape. It runs in a process of its own: triton reads the variable that enables
the interpreter when it is imported. The interpreter computes products of bfloat16 wrongly, so fp32 and
fp16 are tested.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpt2.nsa import lists
from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import chosen_blocks
from tests.gpt2.builders import needs_triton
from tests.gpt2.nsa.test_backends import by_formula, selection
from tests.gpt2.nsa.test_fused import OPTIONS, all_pairs, band

pytestmark = [pytest.mark.long, needs_triton]

SHAPES = {
    # Queries, tokens, query heads of a key head, width, tokens of a block, blocks.
    "blocks": [
        (20, 20, 1, 16, 8, 3),
        (41, 41, 6, 20, 6, 4),
        (13, 29, 3, 64, 5, 3),
        (37, 37, 8, 32, 16, 2),
        (9, 9, 12, 128, 1, 3),
        # Half of the queries belong to the last of two blocks: nsa-quickstart, nsa-125m-production,
        # and heads twice as wide.
        (12, 1094, 2, 32, 64, 16),
        (12, 582, 6, 64, 64, 8),
        (12, 1094, 6, 128, 64, 16),
    ],
    # First token, queries, query heads of a key head, width, l, d, l', n.
    "ranks": [
        (95, 2, 6, 20, 4, 2, 4, 12),
        (0, 9, 1, 16, 2, 2, 2, 20),
        (43, 3, 2, 16, 8, 2, 8, 3),
        (570, 12, 6, 64, 32, 16, 64, 8),
        (140, 3, 2, 16, 2, 2, 2, 5),
    ],
    # First token, queries, query heads of a key head, width, tokens of a key, stride, window (0: none).
    "bands": [
        (0, 40, 2, 16, 1, 1, 7),
        (0, 150, 3, 16, 1, 1, 70),
        (13, 29, 1, 32, 8, 4, 0),
        (3, 200, 16, 16, 2, 2, 0),
        (64, 1, 4, 16, 1, 1, 9),
        (0, 5, 2, 16, 8, 4, 0),
    ],
}
# Relative to the norm.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3}


def drawn(dtype, *sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(each, generator=generator).to(dtype) for each in sizes]


def results(attend, qkv, dcontext, wide):
    """Return the tensors that ``attend`` computes, the first with gradients."""
    leaves = [x.to(wide).requires_grad_() for x in qkv]
    context, *others = attend(*leaves)
    return [context, *others, *torch.autograd.grad(context, leaves, dcontext.to(wide))]


def errors(found, right):
    pairs = [(x.detach().double(), y.detach()) for x, y in zip(found, right, strict=True)]
    return [float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in pairs]


def blocks(dtype, queries, tokens, group, width, size, count):
    """Return the errors of attention to selected blocks, and of its gradients."""
    from gpt2.nsa import fused

    # Several segments for the blocks that many queries select, several chunks of queries, and of tiles.
    fused.SEGMENT = lists.SEGMENT = 8
    lists.PARTIAL_BYTES, lists.TILE_QUERIES = 1 << 16, 5
    chosen = selection(queries, tokens, size, count, touching=False)
    rows, keys = (1, 2, queries, group, width), (1, 2, tokens, width)
    *qkv, dcontext = drawn(dtype, rows, keys, keys, rows)

    def attend(*qkv):
        by_token = (x.transpose(1, 2) for x in qkv)
        return (fused.attend_blocks(*by_token, chosen, size, 0.2).transpose(1, 2),)

    def formula(q, k, v):
        return (by_formula(q * 0.2, k, v, chosen, size),)

    found = results(attend, qkv, dcontext, dtype)
    return errors(found, results(formula, qkv, dcontext, torch.float64))


def bands(dtype, first, queries, group, width, size, stride, window):
    """Return the errors of windows or compressed blocks, also before the first complete block."""
    from gpt2.nsa import fused

    keys = MaskSpec(queries, first + queries, first, size, stride).complete(first + queries)
    sight = MaskSpec(queries, keys, first, size, stride, window or None)
    rows, columns = (2, queries, 3, group, width), (2, keys, 3, width)
    *qkv, dcontext = drawn(dtype, rows, columns, columns, rows)

    def by(attend):
        def attended(*leaves):
            context, logsums = attend(*leaves, sight, 0.2)
            # Rows without a key have no log-sum.
            return context, logsums.where(context.abs().sum(-1) > 0, 0)

        return attended

    found = results(by(fused.attend_band), qkv, dcontext, dtype)
    return errors(found, results(by(band), qkv, dcontext, torch.float64))


def ranks(dtype, first, queries, group, width, compress, stride, size, count):
    """Return the number of blocks that a CPU selects otherwise: also for equal scores, a NaN, more
    blocks than one tile, and fewer than n.
    """
    from gpt2.nsa import fused

    options = replace(OPTIONS, compress=compress, stride=stride, select=size, count=count)
    keys = options.compressed(first + queries)
    q, k = drawn(dtype, (1, 3 * group, queries, width), (1, 3, keys, width))
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
    return [int((found != chosen_blocks(*ranking, options, first, 0)).sum())]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("subject", SHAPES)
def test_equals_the_formula(subject, dtype):
    command = [sys.executable, "-m", __name__, subject, dtype]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(SHAPES[subject])
    assert {n: e for n, e in found.items() if not all(x <= TOLERANCES[dtype] for x in e)} == {}


if __name__ == "__main__":
    measure, dtype_name = {"blocks": blocks, "bands": bands, "ranks": ranks}[sys.argv[1]], sys.argv[
        2
    ]
    printed = {
        str(shape): measure(getattr(torch, dtype_name), *shape) for shape in SHAPES[sys.argv[1]]
    }
    print(json.dumps(printed))
