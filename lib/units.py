"""Quantities as text: counts, durations, sizes, differences of losses.

The one place of these forms, for terminal, Markdown, web page and figures. JSON and CSV contain
numbers.
"""

from collections.abc import Sequence

MIB = 2**20
GIB = 2**30


def format_duration(seconds: float) -> str:
    """Return a duration as ``00:41``, ``1:02:03`` or ``3d 04:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def format_si(number: float) -> str:
    """Return a number with three digits and a unit: ``812``, ``10.4k``, ``124M``."""
    units = ["", "k", "M", "G", "T"]
    while abs(number) >= 999.5 and len(units) > 1:
        del units[0]
        number /= 1000
    unit = units[0]
    digits = 0 if unit == "" or number >= 99.95 else 1
    text = f"{number:.{digits}f}"
    return (text.removesuffix(".0") if digits else text) + unit


def format_amount(number: float) -> str:
    """Return a value of an axis with a unit: ``50k``, ``2.5M``; below 1000 without one."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.4g}"


def format_size(size_bytes: float) -> str:
    """Return a size as ``3.2 GiB``; below 0.1 GiB as ``412.0 MiB``."""
    if size_bytes >= GIB / 10:
        return f"{size_bytes / GIB:,.1f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def format_difference(nats: float) -> str:
    """Return a difference of losses with its sign; zero is ``+0.0000``, never -0.0000."""
    return f"{nats:+z.4f}"


def format_interval(interval: tuple[float, float]) -> str:
    """Return an interval of differences as ``[-0.0062, -0.0011]``."""
    return f"[{', '.join(map(format_difference, interval))}]"


def signed(nats: float) -> str:
    """Return a difference of losses with a typographic minus sign, as wide as a plus sign."""
    return format_difference(nats).replace("-", "−")


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def format_runs(labels: Sequence[str]) -> str:
    """Return the first of ``labels`` and the number of further runs."""
    more = len(labels) - 1
    return f"{labels[0]} and {count(more, 'more run')}" if more else labels[0]
