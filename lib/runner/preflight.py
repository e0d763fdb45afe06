"""Preflight check of the output folder: existence, write permission and free space."""

import os
import shutil
from pathlib import Path

from lib.errors import Problem


def output_problems(folder: Path, bytes_needed: int) -> list[Problem]:
    """Return the reasons why ``bytes_needed`` bytes of results cannot be written to ``folder``.

    ``folder`` may be missing; the nearest existing parent is checked.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        advice = "type: SET='OUTPUT_DIR=\"…\"'"
        return [Problem("not a folder", str(existing), advice, code="output.not-a-folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "make it writable, or set OUTPUT_DIR to another folder"
        return [Problem("not writable", str(existing), advice, code="output.not-writable")]
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        sizes = f"{bytes_needed / 2**20:,.0f} MiB needed, {free / 2**20:,.0f} MiB free"
        what, advice = f"not enough disk space ({sizes})", "free some space, or set OUTPUT_DIR"
        return [Problem(what, str(existing), advice, code="disk.no-space")]
    return []
