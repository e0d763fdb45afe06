"""Decoding equals the full forward pass and reads exactly the visible keys."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.nsa.cache import NsaCache
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.options import BRANCHES
from gpt2.nsa.reference import selected_blocks
from tests.gpt2.nsa.sizes import PAIR, POSITIONS, drawn, every_form, options, seen, turns

LENGTH, ROPE = 34, POSITIONS[1]
# One token, l = 4, l + d = 6 = l' and w + 1; the last ends in the middle of a block.
PROMPTS = (1, 4, 6, 13)


def decoded(case, calls):
    """Return the outputs of all calls and the cache."""
    cache, found = case.module.new_cache(), []
    for part_BTC in case.x_BTC.detach().split(list(calls), 1):
        found.append(case.module(part_BTC, case.state, cache)[0])
        cache.position += part_BTC.shape[1]
    return torch.cat(found, 1), cache


def token(t):
    """Return random keys and values of each branch for one token."""
    return {
        name: tuple(drawn(2, 2, 1, 4, seed=10 * t + 2 * i + j) for j in range(2))
        for i, name in enumerate(BRANCHES)
    }


def query(t):
    return drawn(2, 6, 1, 4, seed=10 * t + 9)


def fed(cache, length):
    """Feed random tokens one at a time."""
    for t in range(length):
        cache.attend(query(t), cache.add(token(t), means(cache.options)))
        cache.position += 1


def means(given):
    """Return the compression of blocks by their mean."""
    return lambda raw: tuple(compress_blocks(x, given, None) for x in raw["compressed"])


@turns("prompt", PROMPTS)
def test_decoding_equals_the_forward_pass(build, nsa, prompt):
    """Decode a prompt, then single tokens, then two tokens at once."""
    sizes = {"n_head": 6, "n_embd": 24}
    pattern = nsa(shared_kv=prompt % 2 == 0)
    case = build(LENGTH, projection=PAIR, pattern=pattern, positions=ROPE, **sizes)
    found, _ = decoded(case, [prompt, *[1] * (LENGTH - prompt - 2), 2])
    torch.testing.assert_close(found, case()[0], atol=1e-10, rtol=1e-10)


@every_form
def test_decoding_of_every_form(build, pattern, positions):
    """Four of up to six blocks are selected, so that ranking matters."""
    case = build(LENGTH, projection=PAIR, pattern=pattern, positions=positions)
    found, _ = decoded(case, [7] + [1] * (LENGTH - 9) + [2])
    torch.testing.assert_close(found, case()[0], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_kept_does_not_depend_on_the_calls(build, shared):
    case = build(20, projection=PAIR, pattern=options(shared_kv=shared), positions=ROPE)
    _, stepwise = decoded(case, [1] * 20)
    lengths = {"selected": 20, "compressed": 9, "raw": 3} | ({} if shared else {"window": 4})
    assert {name: x.shape[2] for name, x in stepwise.kept.items()} == {
        f"{x}_{name}": length for x in "kv" for name, length in lengths.items()
    }
    for prompt in (*PROMPTS, 20):
        _, other = decoded(case, [prompt, *[1] * (20 - prompt)])
        assert other.kept.keys() == stepwise.kept.keys()
        for name, kept in stepwise.kept.items():
            torch.testing.assert_close(other.kept[name], kept, atol=1e-12, rtol=1e-12)


class Step:
    """One decoding step after ``length`` tokens, with the cache locations it may read."""

    def __init__(self, shared, length):
        self.cache = NsaCache(options(phi="mean", shared_kv=shared), 0)
        fed(self.cache, length)
        self.t, self.shared = length, shared
        self.keys = self.cache.add(token(length), means(self.cache.options))

    def __call__(self):
        return self.cache.attend(query(self.t), self.keys)

    def rooms(self, x):
        """Return the cache tensors of keys or values, by use."""
        names = ("compressed", "selected", "raw") + (() if self.shared else ("window",))
        return {name: self.cache.runs[f"{x}_{name}"].room for name in names}

    def places(self, room, b, k):
        """Return the slots of a cache tensor that each branch must read, by definition."""
        given, t = self.cache.options, self.t
        window = range(t - given.window + 1, t + 1)
        if room == "window":
            run = self.cache.runs["v_window"]
            # One more than is kept for the next token.
            return {"window": set(range(run.start - 1, run.stop))}
        keys_MH = self.cache.kept["k_compressed"][b, k]
        if room == "compressed":
            return {"compressed": set(range(len(keys_MH)))}
        if room == "raw":
            return {}
        weights_gM = (query(t)[b, 3 * k : 3 * k + 3, 0] @ keys_MH.T / 2).softmax(-1)
        chosen = selected_blocks(t, weights_gM.sum(0).tolist(), given)
        selected = {s for s in range(t + 1) if s // given.select in chosen}
        return {"selected": selected} | ({"window": set(window)} if self.shared else {})


# In the middle of a block, and at its end.
@pytest.mark.parametrize(("shared", "length"), [(True, 40), (False, 41)])
def test_a_step_reads_what_it_counts_and_nothing_else(shared, length):
    """By NaN in one place of the cached values, and wherever nothing is read."""
    step = Step(shared, length)
    clean = step()
    for (b, k), (name, room) in itertools.product([(0, 1), (1, 0)], step.rooms("v").items()):
        read = step.places(name, b, k)
        for branch, places in read.items():
            assert len(places) == seen(step.cache.options, length)[BRANCHES.index(branch)]
        for place in range(room.shape[2]):
            kept = room[b, k, place].clone()
            room[b, k, place] = math.nan
            for branch, out in zip(BRANCHES, step(), strict=True):
                lost = torch.zeros(2, 6, dtype=torch.bool)
                lost[b, 3 * k : 3 * k + 3] = place in read.get(branch, ())
                lost = lost[..., None, None].expand_as(out)
                assert torch.equal(out.isnan(), lost), (name, place, branch)
            room[b, k, place] = kept
    for x, b, k in itertools.product("vk", range(2), range(2)):
        for name, room in step.rooms(x).items():
            read = set().union(*step.places(name, b, k).values())
            room[b, k, sorted(set(range(room.shape[2])) - read)] = math.nan
    assert all(map(torch.equal, step(), clean))


def test_a_step_makes_no_copy_of_what_is_kept():
    """Check that only the scoring elements of a step grow with the sequence."""

    def made(length):
        cache = NsaCache(options(phi="mean"), 0)
        many, one = ((drawn(1, 2, count, 4),) * 2 for count in (length, 1))
        blocks = means(cache.options)
        cache.add(dict.fromkeys(BRANCHES, many), blocks)
        cache.position = length
        # The first tokens after a prompt make room for as many again.
        for _ in range(8):
            cache.add(dict.fromkeys(BRANCHES, one), blocks)
            cache.position += 1
        with Made() as count:
            cache.attend(drawn(1, 2, 1, 4), cache.add(dict.fromkeys(BRANCHES, one), blocks))
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
