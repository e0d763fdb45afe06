"""Lazy import of the plotting library."""

from typing import Any

from lib.errors import PreflightError, Problem


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` with a file backend.

    Raises PreflightError if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        advice = 'make setup EXTRAS="matplotlib"'
        problem = Problem("matplotlib is not installed", next=advice, code="env.missing-package")
        raise PreflightError(problem) from None
    return plt
