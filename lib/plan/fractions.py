"""Fractions of two-level factorial designs, of resolution IV or more.

The first factors form a full design, and each further one is a product of their signs, its
generator (Box, Hunter and Hunter 2005, table 6.22). In resolution IV no main effect is a linear
combination of two-way interactions; these are aliased with each other in strings.
"""

import itertools
import math

# Without I, which is the identity.
LETTERS = "ABCDEFGHJK"
# Number of factors → generators of the factors after the full design.
_GENERATORS = {
    4: ("ABC",),
    5: ("ABCD",),
    6: ("ABC", "BCD"),
    7: ("ABC", "BCD", "ACD"),
    8: ("BCD", "ACD", "ABC", "ABD"),
    9: ("BCDE", "ACDE", "ABDE", "ABCE"),
    10: ("ABCD", "ABCE", "ABDE", "ACDE", "BCDE"),
}
MIN_FACTORS, MAX_FACTORS = min(_GENERATORS), max(_GENERATORS)


def full_design(factors: int) -> list[tuple[bool, ...]]:
    """Return all 2^n cells, first the cell with every factor off."""
    return list(itertools.product((False, True), repeat=factors))


def fraction(factors: int, folded: int | None = None) -> list[tuple[bool, ...]]:
    """Return the cells of the fraction for 4 to 10 factors, first the cell with every factor off.

    The sign of a generator of even length is negative, so that this cell belongs to the fraction.
    If a factor is ``folded``, the same cells follow with that factor inverted: its interactions are
    then no longer aliased with those of the other factors.
    """
    generators = _GENERATORS[factors]
    cells = []
    for pattern in full_design(factors - len(generators)):
        signs = dict(zip(LETTERS, (1 if on else -1 for on in pattern), strict=False))
        products = (
            math.prod(signs[letter] for letter in word) * (-1) ** (len(word) + 1)
            for word in generators
        )
        cells.append((*pattern, *(sign > 0 for sign in products)))
    if folded is not None:
        cells += [(*c[:folded], not c[folded], *c[folded + 1 :]) for c in cells]
    return cells
