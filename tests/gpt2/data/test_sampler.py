"""Sampled positions: equality with the published generator, and invariances."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.data.sampler import TrainSampler, order_digest_from_manifest
from lib.errors import DataError
from lib.runs.seeds import stream_seed

BITS = (1 << 64) - 1


def philox(counter, key):
    """Return the first of four words of Philox 4x64-10, from the paper's definition."""
    c = [(counter >> 64 * i) & BITS for i in range(4)]
    k = [key & BITS, key >> 64]
    for _ in range(10):
        first, second = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(second >> 64) ^ c[1] ^ k[0], second & BITS, (first >> 64) ^ c[3] ^ k[1], first & BITS]
        k = [(k[0] + 0x9E3779B97F4A7C15) & BITS, (k[1] + 0xBB67AE8584CAA73B) & BITS]
    return c[0]


def sampler(n_tokens=10000, seed=1):
    """Return a sampler of windows of 8 + 1 tokens, which are their positions modulo 1000."""

    def window(offset, length):
        assert 0 <= offset <= n_tokens - length
        return np.arange(offset, offset + length) % 1000

    split = SimpleNamespace(name="training", n_tokens=n_tokens, window=window)
    return TrainSampler(split, 8, seed)


def test_offsets_are_philox_scaled():
    key = stream_seed(1, "data")
    # numpy increments the counter before each block.
    expected = [(philox(g + 1, key) * (10_000 - 8)) >> 64 for g in range(50, 60)]
    assert sampler().offsets(50, 10) == expected


def test_a_sequence_depends_on_its_number_alone():
    at_once = sampler().sequences(0, 64)
    assert at_once.shape == (64, 9) and at_once.dtype == np.int64
    one_by_one = np.concatenate([sampler().sequences(g, 1) for g in range(64)])
    assert np.array_equal(at_once, one_by_one)
    assert (np.diff(at_once) % 1000 == 1).all()


def test_a_split_shorter_than_one_window_is_an_error():
    assert sampler(n_tokens=9).offsets(0, 5) == [0] * 5
    with pytest.raises(DataError) as caught:
        sampler(n_tokens=8)
    assert caught.value.codes == ["data.too-small"]
    assert "at least 9 tokens, got 8" in str(caught.value)


def order_digest(seed=7, tokens=10000, block=8, batch=6, steps=5):
    """Return the digest that follows from a manifest alone."""
    manifest = {
        "seeds": {"seed": seed},
        "batch": {"global_sequences": batch, "tokens_per_iteration": batch * block},
        "data": {"splits": {"train": {"tokens": tokens}}},
    }
    return order_digest_from_manifest(manifest, steps)


def test_the_order_is_a_chain_over_steps():
    """Each digest is the SHA-256 of the previous one and the step's int64 offsets."""
    link = hashlib.sha256(b"").digest()
    for step in range(5):
        numbers = sampler(seed=7).offsets(step * 6, 6)
        link = hashlib.sha256(link + b"".join(n.to_bytes(8, "little") for n in numbers)).digest()
    assert order_digest() == link.hex()


def test_another_order_has_another_digest():
    changes = ({"seed": 8}, {"tokens": 9_990}, {"block": 9}, {"steps": 4})
    # Ten steps of three have the same thirty sequences in other steps.
    digests = [order_digest(**change) for change in (*changes, {"batch": 3, "steps": 10}, {})]
    assert len({*digests}) == len(digests)
