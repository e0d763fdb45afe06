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
    ("form", "value", "text"),
    [
        (format_duration, 0.4, "00:00"),
        (format_duration, 61, "01:01"),
        (format_duration, 3723, "1:02:03"),
        (format_duration, 273900, "3d 04:05"),
        (format_si, 10400, "10.4k"),
        (format_si, 999.6, "1k"),
        (format_si, 124475904, "124M"),
        (format_si, 6.4e12, "6.4T"),
        (format_size, 0, "0.0 MiB"),
        (format_size, 0.1 * GIB, "0.1 GiB"),
        (format_size, 81920 * MIB, "80.0 GiB"),
        # Never minus zero.
        (format_difference, -0.00004, "+0.0000"),
        (format_difference, -0.00006, "-0.0001"),
        (format_difference, 0.0062, "+0.0062"),
        (format_interval, (-0.0062, -1e-9), "[-0.0062, +0.0000]"),
        (signed, -0.0062, "\u22120.0062"),
        (signed, -1e-9, "+0.0000"),
    ],
)
def test_a_quantity_as_text(form, value, text):
    assert form(value) == text
