"""The text files of the tree, as git sees them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from lib.errors import ConfigError


def tree_files(root: Path) -> list[Path]:
    """Files that are tracked or could be added, links left out. ConfigError without git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ConfigError(f"git cannot list the files: {listed.stderr.strip()}")
    paths = (root / name for name in sorted(set(listed.stdout.split("\0")) - {""}))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file that is UTF-8 text, with its text; line ends are not translated."""
    for path in tree_files(root):
        data = path.read_bytes()
        if b"\0" not in data:
            yield path, data.decode("utf-8")
