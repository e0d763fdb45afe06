"""Whether results can be written, before anything is."""

import os
import shutil
from pathlib import Path

from lib.errors import Problem


def output_problems(folder: Path, bytes_needed: int) -> list[Problem]:
    """Why ``folder``, which need not exist, cannot take ``bytes_needed`` of results."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [Problem("is a file, not a folder", str(existing), "type: SET='OUTPUT_DIR=\"…\"'")]
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "make it writable, or set OUTPUT_DIR to another folder"
        return [Problem("cannot be written to", str(existing), advice)]
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        sizes = f"{bytes_needed / 2**20:,.0f} MiB are needed, {free / 2**20:,.0f} MiB are free"
        return [Problem(sizes, str(existing), "free some space, or set OUTPUT_DIR")]
    return []
