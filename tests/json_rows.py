"""Rows of the files of a run that have one JSON object per line."""

from pathlib import Path
from typing import Any

from lib.json_files import parse_json_lines


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file, which may be growing."""
    return parse_json_lines(path, path.read_bytes())
