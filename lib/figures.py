"""The drawing library, loaded where a figure is asked for."""

from typing import Any

from lib.errors import PreflightError, Problem


def pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files. PreflightError with what to type without it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as found
    except ImportError:
        advice = 'type: make setup EXTRAS="matplotlib"'
        raise PreflightError(Problem("the package matplotlib is missing", next=advice)) from None
    return found
