"""Gets kconfiglib's text of a configuration, and puts it on disk so that a crash spoils nothing."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from lib.files import write_atomic


def rendered(write: Callable[[str], str]) -> str:
    """The text that kconfiglib's ``write(path)`` writes; it offers files only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        write(str(path))
        return path.read_text(encoding="utf-8")


def save_config(path: Path, text: str) -> bool:
    """Write ``.config``, keeping a differing older one as ``.old``. False: it was the same."""
    old = path.read_bytes() if path.exists() else None
    if old == text.encode():
        return False
    if old is not None:
        write_atomic(path.with_name(path.name + ".old"), old)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return True
