"""Quantization schemes and their availability; does not import torch."""

import importlib.util

from lib.errors import ConfigError, PreflightError, Problem

# int8 is implemented here; the 4-bit schemes use bitsandbytes.
FOUR_BIT_SCHEMES = ("nf4", "fp4")
SCHEMES = ("none", "int8", *FOUR_BIT_SCHEMES)
PACKAGE = "bitsandbytes"


def parse_schemes(text: str) -> list[str]:
    """Return the schemes in ``text``, such as ``none,nf4``. Raises ConfigError or PreflightError."""
    names = list(dict.fromkeys(text.replace(",", " ").split())) or ["none"]
    if unknown := [name for name in names if name not in SCHEMES]:
        what = f"unknown scheme {unknown[0]!r} (expected {', '.join(SCHEMES)})"
        advice = "type: make evaluate RUN=NAME QUANT=int8"
        raise ConfigError(Problem(what, "QUANT", advice, code="usage.invalid-value"))
    four_bit = [name for name in names if name in FOUR_BIT_SCHEMES]
    if four_bit and importlib.util.find_spec(PACKAGE) is None:
        what, advice = f"{four_bit[0]} requires the missing package {PACKAGE}", "type: make setup"
        problem = Problem(what, "QUANT", f"{advice} EXTRAS={PACKAGE}", code="env.missing-package")
        raise PreflightError(problem)
    return names
