"""The ways of rounding weights, and whether one can be had here; imports no torch."""

import importlib.util

from lib.errors import ConfigError, PreflightError, Problem

# 8-bit integers are this program's own; four bits are bitsandbytes'.
FOUR_BITS = ("nf4", "fp4")
SCHEMES = ("none", "int8", *FOUR_BITS)
PACKAGE = "bitsandbytes"


def parse_schemes(text: str) -> list[str]:
    """``int8`` or ``none,nf4``; nothing is none. ConfigError where there is no such scheme.

    PreflightError where the package of one is missing.
    """
    names = list(dict.fromkeys(text.replace(",", " ").split())) or ["none"]
    if unknown := [name for name in names if name not in SCHEMES]:
        what = f"{unknown[0]!r} is none of {', '.join(SCHEMES)}"
        raise ConfigError(Problem(what, "QUANT"))
    needing = [name for name in names if name in FOUR_BITS]
    if needing and importlib.util.find_spec(PACKAGE) is None:
        what = f"{needing[0]} needs the package {PACKAGE}, which is not installed"
        raise PreflightError(Problem(what, "QUANT", f"type: make setup EXTRAS={PACKAGE}"))
    return names


def refuse_training(scheme: str) -> None:
    """ConfigError where ``QUANT`` is given to a command that trains or plans training."""
    if scheme not in ("", "none"):
        what = f"{scheme!r}: quantization is for finished runs, and training has none"
        raise ConfigError(Problem(what, "QUANT", "type: make evaluate RUN=NAME QUANT=int8"))
