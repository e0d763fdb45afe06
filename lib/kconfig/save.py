"""Rendering of kconfiglib's configuration text and atomic writes of ``.config``."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from lib.files import write_atomic


def rendered(write: Callable[[str], str]) -> str:
    """Return the text that kconfiglib's ``write(path)`` writes; kconfiglib only writes files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        write(str(path))
        return path.read_text(encoding="utf-8")


def save_config(path: Path, text: str) -> bool:
    """Write ``.config``, save a different previous file as ``.old``, return whether it changed."""
    old = path.read_bytes() if path.exists() else None
    if old == text.encode():
        return False
    if old is not None:
        write_atomic(path.with_name(path.name + ".old"), old)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return True
