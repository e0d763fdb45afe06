"""Decoding: equal to the whole pass, from what is kept, reading what a token sees."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.attention.nsa import cache as nsa_cache
from gpt2.attention.nsa.cache import NsaCache, Ring
from gpt2.attention.nsa.compress import compress
from gpt2.attention.nsa.options import BRANCHES
from tests.gpt2.attention.nsa.sizes import PAIR, drawn, options

LENGTH = 34
# Around l = 4, l + d = 6 = l', l' + 1, w = 5 and w + 1; the last ends in the middle of a block.
PROMPTS = (1, 3, 4, 5, 6, 7, 12, 13, 20)


def decoded(case, calls):
    """Outputs of all calls, and the cache."""
    cache, found = case.module.new_cache(), []
    for part_BTC in case.x_BTC.detach().split(list(calls), 1):
        found.append(case.module(part_BTC, case.state, cache)[0])
        cache.position += part_BTC.shape[1]
    return torch.cat(found, 1), cache


def fed(cache, length, seed=0):
    """Keeps random tokens, one after the other; of every call the reads, and the last keys."""
    reads = []
    for t in range(length):
        token = {
            name: tuple(drawn(2, 2, 1, 4, seed=seed + 10 * t + 2 * i + j) for j in range(2))
            for i, name in enumerate(BRANCHES)
        }
        keys = cache.add(token, halves)
        before = dict(cache.reads)
        out = cache.attend(drawn(2, 6, 1, 4, seed=seed + 10 * t + 9), keys)
        reads.append([cache.reads[name] - before.get(name, 0) for name in BRANCHES])
        cache.position += 1
    return reads, keys, out


def halves(raw):
    """Blocks by their mean."""
    k, v = raw["compressed"]
    return compress(k, options(phi="mean"), None), compress(v, options(phi="mean"), None)


class TestDecoding:
    """A token after the other, and a prompt of any length first."""

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_equals_the_forward_pass(self, build, shared, prompt):
        case = build(
            LENGTH, projection=PAIR, pattern=options(shared_kv=shared), n_head=6, n_embd=24
        )
        found, _ = decoded(case, [prompt, *[1] * (LENGTH - prompt - 2), 2])
        torch.testing.assert_close(found, case()[0], atol=1e-10, rtol=1e-10)

    @pytest.mark.parametrize("shared", [True, False])
    def test_what_is_kept_does_not_depend_on_the_calls(self, build, shared):
        """The same numbers in the same places after any prompt."""
        pattern = options(shared_kv=shared)
        case = build(LENGTH, projection=PAIR, pattern=pattern)
        _, stepwise = decoded(case, [1] * LENGTH)
        for prompt in (*PROMPTS, LENGTH):
            _, other = decoded(case, [prompt, *[1] * (LENGTH - prompt)])
            assert other.kept.keys() == stepwise.kept.keys()
            for name, kept in stepwise.kept.items():
                torch.testing.assert_close(other.kept[name], kept, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("shared", [True, False])
    def test_what_is_kept(self, build, shared):
        pattern = options(shared_kv=shared)
        case = build(20, projection=PAIR, pattern=pattern)
        _, cache = decoded(case, [20])
        own = {} if shared else {"_raw": 4, "_window": 5}
        lengths = {"": 20, "_compressed": 9, **own}
        assert {name: x.shape[2] for name, x in cache.kept.items()} == {
            f"{x}{name}": length for x in "kv" for name, length in lengths.items()
        }
        numbers = sum(x.nbytes for x in cache.kept.values()) / (2 * 8)
        assert numbers == case.options.cached_numbers(case.shape, 20)


def test_a_ring_holds_the_last_tokens():
    ring, tokens = Ring(5), torch.arange(23.0).view(1, 1, 23, 1)
    for first, last in ((0, 3), (3, 4), (4, 11), (11, 12), (12, 23)):
        new = tokens[:, :, first:last]
        start = max(0, first - 4)
        assert torch.equal(ring.with_new(new, first, start), tokens[:, :, start:last])
        kept = ring.write(new, first).flatten().tolist()
        assert sorted(kept) == list(range(max(0, last - 5), last))
        assert all(kept[int(token) % 5] == token for token in kept)


class TestReads:
    """Keys of each branch, counted where they are multiplied."""

    def expected(self, given, t):
        blocks = 0 if t + 1 < given.compress else (t + 1 - given.compress) // given.stride + 1
        chosen = (min(given.count, t // given.select + 1) - 1) * given.select
        return [blocks, chosen + t % given.select + 1, min(given.window, t + 1)]

    @pytest.mark.parametrize("sizes", [{}, {"count": 3, "window": 12}, {"compress": 6}])
    def test_a_token_reads_what_it_sees(self, sizes):
        given = options(**sizes, phi="mean")
        cache = NsaCache(given, 0)
        cache_reads = []
        for t in range(3 * given.window + 20):
            token = {n: (drawn(1, 2, 1, 4, seed=t), drawn(1, 2, 1, 4, seed=-t)) for n in BRANCHES}
            keys = cache.add(
                token, lambda raw: tuple(compress(x, given, None) for x in raw["compressed"])
            )
            before = cache.reads.copy()
            cache.attend(drawn(1, 4, 1, 4, seed=t), keys)
            cache_reads.append([cache.reads[n] - before[n] for n in BRANCHES])
            cache.position += 1
        assert cache_reads == [self.expected(given, t) for t in range(len(cache_reads))]

    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_after_a_prompt(self, build, prompt):
        pattern = options()
        case = build(LENGTH, projection=PAIR, pattern=pattern)
        _, cache = decoded(case, [prompt, *[1] * (LENGTH - prompt)])
        first = prompt if prompt > 1 else 0
        rows = [self.expected(pattern, t) for t in range(first, LENGTH)]
        assert [cache.reads[name] for name in BRANCHES] == [sum(x) for x in zip(*rows)]

    def test_the_papers_table(self):
        """Of 32 · 16 · 64 · 16 · 512 at a thousand tokens and more."""
        reads = []
        for length in (1, 31, 32, 64, 1024, 2048):
            given = options(compress=32, stride=16, select=64, count=16, window=512, phi="mean")
            cache = NsaCache(given, 0)

            def blocks(raw):
                return tuple(compress(x, given, None) for x in raw["compressed"])

            for count in filter(None, (length - 1, 1)):
                new = {n: (torch.ones(1, 1, count, 2),) * 2 for n in BRANCHES}
                keys = cache.add(new, blocks)
                cache.position += count
            cache.position -= 1
            cache.attend(torch.ones(1, 1, 1, 2), keys)
            reads.append(sum(cache.reads.values()))
        assert reads == [2, 62, 65, 131, 1599, 1663]


class TestPoison:
    """What a step does not count it does not read: NaN there changes nothing."""

    def step(self, spoil, length=41):
        """The output of a step on a cache in which ``spoil`` has been put."""
        cache = NsaCache(options(phi="mean"), 0)
        fed(cache, length)
        token = {n: (drawn(2, 2, 1, 4, seed=1000), drawn(2, 2, 1, 4, seed=1001)) for n in BRANCHES}
        keys = cache.add(token, halves)
        spoil(cache)
        return cache.attend(drawn(2, 6, 1, 4, seed=1002), keys), cache

    def selected(self):
        """The blocks of the step, by batch row and head."""
        seen = []
        right = nsa_cache.select_blocks

        def note(*given):
            seen.append(right(*given))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nsa_cache, "select_blocks", note)
            self.step(lambda cache: None)
        return seen[-1][:, :, 0]

    def test_outside_of_what_is_read(self):
        blocks_BKn = self.selected()
        assert len({tuple(row) for row in blocks_BKn.flatten(0, 1).tolist()}) > 1

        def spoil(cache):
            for x in "kv":
                room = cache.runs[x].room
                places = torch.arange(room.shape[2])
                for b, k in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
                    read = torch.isin(places // 6, blocks_BKn[b, k]) & (places <= cache.position)
                    room[b, k, ~read] = math.nan
                blocks = cache.runs[f"{x}_compressed"]
                blocks.room[:, :, blocks.stop :] = math.nan
                cache.rings[f"{x}_raw"].room_BKSH.fill_(math.nan)

        clean, poisoned = self.step(lambda cache: None)[0], self.step(spoil)[0]
        assert all(map(torch.equal, clean, poisoned))

    @pytest.mark.parametrize("branch", range(3))
    def test_inside(self, branch):
        blocks_BKn = self.selected()
        place = (0, 1, int(blocks_BKn[0, 1, 1]) * 6)

        def spoil(cache):
            name = ("v_compressed", "v", "v_window")[branch]
            kept = cache.kept[name]
            kept[place if branch == 1 else (0, 1, 3)] = math.nan

        found = self.step(spoil)[0]
        assert [not out.isfinite().all() for out in found] == [i == branch for i in range(3)]


def test_a_step_makes_no_copy_of_what_is_kept():
    """Of the numbers that its operators make, only those of scoring grow with the sequence."""

    def made(length):
        cache = NsaCache(options(phi="mean"), 0)
        cache.add({n: (drawn(1, 2, length, 4), drawn(1, 2, length, 4)) for n in BRANCHES}, halves)
        cache.position = length
        token = {n: (drawn(1, 2, 1, 4), drawn(1, 2, 1, 4)) for n in BRANCHES}
        # The first tokens after a prompt make room for as many again.
        for _ in range(8):
            cache.add(token, halves)
            cache.position += 1
        with Made() as count:
            cache.attend(drawn(1, 2, 1, 4), cache.add(token, halves))
        return count.numbers

    # A token has half a compressed key and a sixth of a block for each of two heads, and no copy of
    # keys and values of 2 · 2 · 4 numbers. A dozen operators look at a score.
    assert (made(4002) - made(2002)) / 2000 < 12


class Made(TorchDispatchMode):
    """Counts the elements of new tensors."""

    numbers = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        found = function(*given, **(named or {}))
        places = [x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in places:
            self.numbers += found.numel()
        return found
