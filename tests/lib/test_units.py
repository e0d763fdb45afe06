"""Quantities as text."""

import pytest

from lib.units import (
    GIB,
    MIB,
    format_difference,
    format_duration,
    format_interval,
    format_si,
    format_size,
    signed,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "00:00"), (61, "01:01"), (3723, "1:02:03"), (273900, "3d 04:05")]
)
def test_times(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (812, "812"),
        (10400, "10.4k"),
        (2000, "2k"),
        (999.6, "1k"),
        (124475904, "124M"),
        (6.4e12, "6.4T"),
    ],
)
def test_large_numbers(number, text):
    assert format_si(number) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (51 * MIB, "51.0 MiB"), (0.1 * GIB, "0.1 GiB"), (81920 * MIB, "80.0 GiB")],
)
def test_sizes(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("nats", "text"),
    [(-0.00004, "+0.0000"), (-0.0, "+0.0000"), (-0.00006, "-0.0001"), (0.0062, "+0.0062")],
)
def test_a_difference_is_never_minus_zero(nats, text):
    assert format_difference(nats) == text


def test_the_web_page_has_a_typographic_minus():
    assert signed(-0.0062) == "\u22120.0062" and signed(-1e-9) == "+0.0000"


def test_intervals():
    assert format_interval((-0.0062, -1e-9)) == "[-0.0062, +0.0000]"
