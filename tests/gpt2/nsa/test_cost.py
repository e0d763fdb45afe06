"""Declared against actual parameters, operations and memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.nsa import block_major, branches, gather, query_major
from gpt2.nsa.module import compress_blocks
from tests.gpt2.nsa.sizes import PAIR, SIZES, options, seen


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 18, 19, 60, 61])
@pytest.mark.parametrize("sizes", [{}, {"count": 5}, {"compress": 6, "stride": 3}])
def test_pairs_are_those_of_the_definition(length, sizes):
    given = options(**sizes)
    pairs = tuple(map(sum, zip(*(seen(given, t) for t in range(length)))))
    assert given.pairs(length) == pairs
    assert given.mean_keys(length) == sum(pairs) / length


def kept_bytes(forward):
    """Return the bytes saved for backward, counting each storage once."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


def test_backward_keeps_queries_once():
    """Check that only outputs, log-sums, branch keys and the selection are saved besides."""
    heads, groups, length, width = 4, 2, 64, 8
    q = torch.randn(1, heads, length, width, requires_grad=True)
    kv = [torch.randn(1, groups, length, width, requires_grad=True) for _ in range(4)]
    small = tuple(compress_blocks(x, options(), None) for x in kv[:2])

    def forward():
        keys = branches.BranchKeyValues(small, (kv[0], kv[1]), (kv[2], kv[3]))
        return branches.attend_branches(q, keys, options(), 0)

    numbers = q.numel() * (1 + 3) + heads * length * 3 + sum(x.numel() for x in (*kv, *small))
    assert kept_bytes(forward) == 4 * numbers + 8 * groups * length * options().count


class Operations(TorchDispatchMode):
    """Counter of operators, including those inside the custom operators."""

    count = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.count += 1
        if function.namespace != "kablate":
            return function(*given, **(named or {}))
        own = vars(block_major)[function.overloadpacket.__name__]
        with self:
            return own._init_fn(*given, **(named or {}))


class TestOperations:
    """Number of operators in forward and backward."""

    def counted(self, case):
        with Operations() as found:
            case()[0].sum().backward()
        return found.count

    def test_of_larger_blocks_and_chunks_there_are_no_more(self, build, nsa, monkeypatch):
        """Check that no operator runs per token: larger chunks, the same number of operators."""
        found = []
        for scale in (1, 2):
            monkeypatch.setattr(query_major, "CHUNK_ELEMENTS", 0)
            monkeypatch.setattr(query_major, "MIN_CHUNK_ROWS", 8 * scale)
            monkeypatch.setattr(block_major, "QUERIES_PER_VISIT", 12 * scale)
            # Keys of four blocks of so many tokens, for 12 queries each time.
            monkeypatch.setattr(gather, "CHUNK_ELEMENTS", 12 * scale * 8 * 6 * scale * 4)
            named = ("compress", "stride", "select", "window")
            sizes = {name: scale * SIZES[name] for name in named}
            # All blocks are selected, so that what is chosen does not matter.
            pattern = nsa(**sizes, count=8)
            found.append(self.counted(build(48 * scale, projection=PAIR, pattern=pattern)))
        assert found[0] == found[1]

    def test_grow_as_the_number_of_blocks(self, build, nsa):
        """Check linear growth; the first block's queries fill several visits at once."""
        few, many = (
            self.counted(build(length, batch=1, projection=PAIR, pattern=nsa()))
            for length in (60, 240)
        )
        assert many <= 4.1 * few
