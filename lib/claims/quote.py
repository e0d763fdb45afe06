"""Quoted numbers: the digits of a text, compared with a number of a record.

A quoted number holds if the recorded number lies within half a unit of its last digit. A recorded
number halfway between two quotable ones may therefore be rounded either way, because programs round
to even and people round up; every other number has one correct rounding.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

# Unit of a recorded number → units in which it may be quoted, with the factor to the recorded one.
UNITS: Mapping[str, Mapping[str, Decimal]] = {
    "nats": {"nats": Decimal(1)},
    "s": {"s": Decimal(1), "ms": Decimal("0.001"), "min": Decimal(60), "h": Decimal(3600)},
    "tokens": {"tokens": Decimal(1)},
    "tok/s": {"tok/s": Decimal(1)},
    "parameters": {"parameters": Decimal(1)},
    "iterations": {"it": Decimal(1), "iterations": Decimal(1)},
    "fraction": {"%": Decimal("0.01")},
    "": {},
}
_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9}
_MINUS = "−"
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?P<fraction>\.[0-9]+)?"
    r"(?:e(?P<exponent>[-+]?[0-9]{1,3}))?(?P<prefix>[kMG]?)(?: ?(?P<unit>%|[a-z/]+))?"
)


@dataclass(frozen=True)
class QuotedNumber:
    """A number as a text quotes it, such as ``−0.0062 nats``, ``122,880 tokens`` or ``7.9k tok/s``."""

    sign: str
    whole: str
    # With the decimal point; "" for a whole number.
    fraction: str
    # Power of ten that the text states as e-5; None if it states none.
    exponent: int | None
    prefix: str
    # "" if the text states none: then the recorded unit.
    unit: str
    # Factor from the quoted to the recorded unit.
    factor: Decimal

    @classmethod
    def parse(cls, text: str, recorded_unit: str) -> "QuotedNumber":
        """Return the number of ``text``, which quotes a number in ``recorded_unit``.

        Raises ValueError, with the expected form, if the text or its unit is invalid.
        """
        units = UNITS[recorded_unit]
        match = _NUMBER.fullmatch(text.strip())
        unit = (match["unit"] or "") if match else ""
        if match is None or (unit and unit not in units):
            expected = " or ".join(units) or "no unit"
            raise ValueError(f"expected a number such as -0.0062 or 12,345, in {expected}")
        exponent = match["exponent"]
        return cls(
            match["sign"],
            match["whole"],
            match["fraction"] or "",
            None if exponent is None else int(exponent),
            match["prefix"],
            unit,
            units[unit] if unit else Decimal(1),
        )

    @property
    def number(self) -> str:
        """Return the number as quoted, without its unit."""
        exponent = "" if self.exponent is None else f"e{self.exponent}"
        return f"{self.sign}{self.whole}{self.fraction}{exponent}{self.prefix}"

    @property
    def text(self) -> str:
        """Return the number with its unit."""
        separator = " " if self.unit and self.unit != "%" else ""
        return f"{self.number}{separator}{self.unit}"

    @property
    def value(self) -> Decimal:
        """Return the number in the recorded unit."""
        digits = Decimal(f"{self.whole.replace(',', '')}{self.fraction}")
        return (-digits if self.sign in ("-", _MINUS) else digits) * self._place

    @property
    def step(self) -> Decimal:
        """Return one unit of the last digit, in the recorded unit."""
        return self._place.scaleb(-len(self.fraction[1:]))

    @property
    def _place(self) -> Decimal:
        return self.factor.scaleb((self.exponent or 0) + _PREFIXES[self.prefix])

    def holds(self, recorded: float) -> bool:
        """Return whether ``recorded`` rounds to this number; a signed zero must have its sign."""
        exact = Decimal(repr(recorded))
        if self.value == 0 and self.sign and exact != 0:
            return (exact < 0) == (self.sign != "+") and abs(exact) <= self.step / 2
        return abs(exact - self.value) <= self.step / 2

    def of(self, recorded: float) -> "QuotedNumber":
        """Return ``recorded`` quoted in the same unit, with as many digits."""
        exact = Decimal(repr(recorded)) / self._place
        digits = f"{abs(exact):{',' if ',' in self.whole else ''}.{len(self.fraction[1:])}f}"
        whole, point, fraction = digits.partition(".")
        minus = self.sign if self.sign == _MINUS else "-"
        sign = minus if exact < 0 else "+" if self.sign else ""
        return QuotedNumber(
            sign, whole, point + fraction, self.exponent, self.prefix, self.unit, self.factor
        )
