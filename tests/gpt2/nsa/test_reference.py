"""Values and all gradients against the query-by-query reference; declared parameters."""

from gpt2.attention.options import GroupedOptions
from tests.gpt2.nsa.sizes import PAIR, POSITIONS, every_form, options, turns

LEARNED, ROPE = POSITIONS


@every_form
def test_every_form_has_the_values_and_the_parameters_that_are_declared(
    build, thin_rows, pattern, positions
):
    # Four of five blocks are selected, so that ranking matters.
    case = build(27, batch=1, projection=PAIR, pattern=pattern, positions=positions)
    case.assert_equals_reference(1e-10)
    parameters, cost = dict(case.module.named_parameters()), case.options.cost(case.shape, 0)
    assert sum(p.numel() for p in parameters.values()) == cost.params
    assert sum(p.numel() for p in parameters.values() if p.ndim >= 2) == cost.weights
    slopes = zip(case.leaves(), case.gradients(case()), strict=True)
    assert [name for name, slope in slopes if not slope.count_nonzero()] == []


@turns("key_heads", [1, 4])
def test_key_heads(build, thin_rows, nsa, key_heads):
    case = build(20, projection=GroupedOptions(key_heads), pattern=nsa(), bias=False)
    case.assert_equals_reference(1e-10)


@turns("sizes", [(1, 1, 1), (2, 1, 3), (4, 4, 4), (6, 2, 6), (3, 3, 9)])
def test_sizes(build, thin_rows, nsa, sizes):
    named = dict(zip(("compress", "stride", "select"), sizes))
    pattern = nsa(**named, count=4)
    build(23, batch=1, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)


# Around l = 4, l' = 6 and w = 5, and 2w + 3, at none of their multiples.
@turns("length", [1, 2, 3, 4, 5, 6, 7, 13])
def test_lengths(build, thin_rows, nsa, length):
    case = build(length, batch=1, projection=PAIR, pattern=nsa(), positions=ROPE)
    case.assert_equals_reference(1e-10)


def test_a_scale_of_heads_from_the_mlp(build):
    case = build(15, projection=PAIR, pattern=options(), handed_on=True)
    case.assert_equals_reference(1e-10)
