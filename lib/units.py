"""Human-readable durations and large numbers."""


def clock(seconds: float) -> str:
    """Return a duration as ``00:41``, ``1:02:03`` or ``3d 04:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def short(number: float) -> str:
    """Return a number with three digits and a unit: ``812``, ``10.4k``, ``124M``."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            break
        number /= 1000
    digits = 0 if unit == "" or number >= 99.95 else 1
    text = f"{number:.{digits}f}"
    return (text.removesuffix(".0") if digits else text) + unit
