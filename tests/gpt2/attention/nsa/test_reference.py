"""Values and every gradient are those of the definitions, query by query."""

import itertools

import pytest

from gpt2.attention.grouped.options import GroupedOptions
from tests.gpt2.attention.nsa.sizes import PAIR, options


class TestAgainstReference:
    """Values and every gradient."""

    @pytest.mark.parametrize(
        "form", list(itertools.product([True, False], ["mean", "mlp"], ["sigmoid", "softmax"]))
    )
    def test_forms(self, build, thin_rows, form):
        shared, phi, gate = form
        pattern = options(shared_kv=shared, phi=phi, gate=gate)
        build(27, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)

    @pytest.mark.parametrize("key_heads", [1, 4])
    def test_key_heads(self, build, thin_rows, key_heads):
        case = build(20, projection=GroupedOptions(key_heads), pattern=options(), bias=False)
        case.assert_equals_reference(1e-10)

    @pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3), (4, 4, 4), (6, 2, 6), (3, 3, 9)])
    @pytest.mark.parametrize("shared", [True, False])
    def test_sizes(self, build, thin_rows, sizes, shared):
        named = dict(zip(("compress", "stride", "select"), sizes))
        pattern = options(**named, shared_kv=shared, count=4)
        build(23, batch=1, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)

    # Around l = 4, l' = 6 and w = 5, and at none of their multiples.
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 13])
    def test_lengths(self, build, thin_rows, length):
        build(length, projection=PAIR, pattern=options()).assert_equals_reference(1e-10)

    def test_a_scale_of_heads_from_the_mlp(self, build):
        case = build(15, projection=PAIR, pattern=options(), handed_on=True)
        case.assert_equals_reference(1e-10)
