"""Values and all gradients against the query-by-query reference."""

import itertools

import pytest

from gpt2.attention.options import GroupedOptions
from tests.gpt2.nsa.sizes import PAIR, POSITIONS, every_form, options, pattern_of

LEARNED, ROPE = POSITIONS
BY_MODULE = itertools.product([True, False], ["mean", "mlp"], ["sigmoid", "softmax"])


@every_form
def test_branches_and_selections(build, thin_rows, branches, kind, shared):
    # Every branch meets both kinds of positions, with shared keys and without.
    rotates = shared ^ (kind == "random") ^ (len(branches) == 2)
    pattern = pattern_of(branches, kind, shared)
    case = build(27, projection=PAIR, pattern=pattern, positions=ROPE if rotates else LEARNED)
    case.assert_equals_reference(1e-10)


@pytest.mark.parametrize(("shared", "phi", "gate"), list(BY_MODULE))
def test_forms(build, thin_rows, shared, phi, gate):
    pattern = options(shared_kv=shared, phi=phi, gate=gate)
    positions = ROPE if phi == "mlp" else LEARNED
    build(20, projection=PAIR, pattern=pattern, positions=positions).assert_equals_reference(1e-10)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_key_heads(build, thin_rows, nsa, key_heads):
    case = build(20, projection=GroupedOptions(key_heads), pattern=nsa(), bias=False)
    case.assert_equals_reference(1e-10)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3), (4, 4, 4), (6, 2, 6), (3, 3, 9)])
def test_sizes(build, thin_rows, nsa, sizes):
    named = dict(zip(("compress", "stride", "select"), sizes))
    pattern = nsa(**named, count=4)
    build(23, batch=1, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)


# Around l = 4, l' = 6 and w = 5, and 2w + 3, at none of their multiples.
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 13])
def test_lengths(build, thin_rows, nsa, length):
    case = build(length, projection=PAIR, pattern=nsa(), positions=ROPE)
    case.assert_equals_reference(1e-10)


def test_a_scale_of_heads_from_the_mlp(build):
    case = build(15, projection=PAIR, pattern=options(), handed_on=True)
    case.assert_equals_reference(1e-10)
