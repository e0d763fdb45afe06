"""Planned runs with fabricated results, and claims about them."""

from tests.lib.report.conftest import make_run

__all__ = ["make_run"]
