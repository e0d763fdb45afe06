"""Quantization schemes and their availability; does not import torch."""

import importlib.util
from collections.abc import Iterable
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem

# int8 is implemented here; the 4-bit schemes use bitsandbytes.
FOUR_BIT_SCHEMES = ("nf4", "fp4")
SCHEMES = ("none", "int8", *FOUR_BIT_SCHEMES)
PACKAGE = "bitsandbytes"


def quantization_fields(scheme: str = "none") -> dict[str, Any]:
    """Return what records say of matrices in the ``scheme``; null without bitsandbytes."""
    four_bits = scheme in FOUR_BIT_SCHEMES
    return {
        "quantization_enabled": scheme != "none",
        "quantization_scheme": f"4bit_{scheme}" if four_bits else scheme,
        "bnb_compute_dtype": "float32" if four_bits else None,
        "bnb_double_quant": False if four_bits else None,
    }


def parse_schemes(text: str) -> list[str]:
    """Return the schemes in ``text``, such as ``none,nf4``. Raises ConfigError or PreflightError."""
    names = list(dict.fromkeys(text.replace(",", " ").split())) or ["none"]
    if unknown := [name for name in names if name not in SCHEMES]:
        what = f"unknown scheme {unknown[0]!r} (expected {', '.join(SCHEMES)})"
        advice = "type: make evaluate RUN=NAME QUANT=int8"
        raise ConfigError(Problem(what, "QUANT", advice, code="usage.invalid-value"))
    if problems := missing_package(names, "QUANT"):
        raise PreflightError(*problems)
    return names


def missing_package(schemes: Iterable[str], where: str) -> list[Problem]:
    """Return a problem, located at the variable ``where``, if a scheme lacks its package."""
    four_bit = [name for name in schemes if name in FOUR_BIT_SCHEMES]
    if not four_bit or importlib.util.find_spec(PACKAGE):
        return []
    what = f"{four_bit[0]} requires the missing package {PACKAGE}"
    advice = f"type: make setup EXTRAS={PACKAGE}"
    return [Problem(what, where, advice, code="env.missing-package")]
