"""Quoted numbers: digits, rounding, signs and units."""

import pytest

from lib.claims.quote import QuotedNumber


def holds(text: str, recorded: float, unit: str = "nats") -> bool:
    return QuotedNumber.parse(text, unit).holds(recorded)


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("-0.0062", -0.00624),
        ("−0.0062", -0.00615),
        ("+0.10", 0.0999),
        ("2.4759", 2.475949),
        ("0", -0.4),
        ("-0.0000", -0.00001),
        ("+0.0000", 0.0),
        ("6.2e-3", 0.0062),
        ("1.5e300", 1.5e300),
        ("2.4759 nats", 2.4759),
    ],
)
def test_a_number_holds_if_it_has_the_quoted_digits(text, recorded):
    assert holds(text, recorded)


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("-0.0062", 0.0062),
        ("-0.0062", -0.00626),
        ("-0.0062", -0.00614),
        ("2.4759", 2.47596),
        ("-0.0000", 0.00001),
        ("+0.0000", -0.00001),
        ("0.00620", 0.00624),
        ("6.2e-3", 0.00626),
    ],
)
def test_a_number_with_other_digits_or_another_sign_does_not_hold(text, recorded):
    assert not holds(text, recorded)


@pytest.mark.parametrize("recorded", [0.125, -0.125, 0.375, 2.675, 1.005])
def test_a_number_halfway_may_be_rounded_either_way(recorded):
    """Programs print 0.12 for 0.125, and 2.67 for 2.675; people write 0.13 and 2.68."""
    printed = f"{recorded:.2f}"
    away = f"{recorded + (0.004 if recorded > 0 else -0.004):.2f}"
    nearer = f"{recorded - (0.004 if recorded > 0 else -0.004):.2f}"
    assert holds(printed, recorded) and holds(away, recorded) and holds(nearer, recorded)
    assert not holds(printed, recorded + 0.011) and not holds(away, recorded - 0.011)


def test_the_printed_digits_of_any_number_hold_and_their_neighbours_do_not():
    for i in range(1, 2000):
        recorded = (i * 7919 % 20011 - 10000) / 6553.7
        printed = f"{recorded:.3f}"
        assert holds(printed, recorded)
        neighbour = f"{float(printed) + 0.001:.3f}"
        assert not holds(neighbour, recorded)


@pytest.mark.parametrize(
    ("text", "unit", "recorded"),
    [
        ("14.5 s", "s", 14.49),
        ("173.6 ms", "s", 0.17362),
        ("1.5 min", "s", 91.0),
        ("122,880 tokens", "tokens", 122880),
        ("124M", "parameters", 123_500_000),
        ("7.9k tok/s", "tok/s", 7862.0),
        ("50%", "fraction", 0.504),
        ("50 %", "fraction", 0.504),
        ("120 it", "iterations", 120),
        ("11.89", "", 11.8931),
    ],
)
def test_units(text, unit, recorded):
    assert holds(text, recorded, unit)
    assert not holds(text, recorded * 1.1, unit)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("", "nats"),
        ("about 3", "nats"),
        ("1.", "nats"),
        (".5", "nats"),
        ("1,23", "nats"),
        ("nan", "nats"),
        ("1e", "nats"),
        ("3 s", "nats"),
        ("3 %", "s"),
        ("3 m", "s"),
    ],
)
def test_malformed_numbers_and_units_are_refused(text, unit):
    with pytest.raises(ValueError, match="expected"):
        QuotedNumber.parse(text, unit)


@pytest.mark.parametrize(
    ("text", "unit", "recorded", "expected"),
    [
        ("-0.0062", "nats", -0.00484, "-0.0048"),
        ("−0.0062", "nats", 0.00484, "+0.0048"),
        ("2.47", "nats", 2.5, "2.50"),
        ("122,880 tokens", "tokens", 1234567, "1,234,567 tokens"),
        ("7.9k tok/s", "tok/s", 5899.0, "5.9k tok/s"),
        ("1.5 min", "s", 30.0, "0.5 min"),
        ("50%", "fraction", 0.25, "25%"),
        ("6.2e-3 nats", "nats", 0.0071, "7.1e-3 nats"),
    ],
)
def test_another_number_is_quoted_in_the_same_form(text, unit, recorded, expected):
    quoted = QuotedNumber.parse(text, unit).of(recorded)
    assert quoted.text == expected and quoted.holds(recorded)
