"""Text files of the tree, as listed by git."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from lib.errors import ConfigError, Problem


def tree_files(root: Path) -> list[Path]:
    """Return the files that git tracks or could add, without symlinks.

    Raises ConfigError if git cannot list the files.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        what = f"git cannot list the files: {listed.stderr.strip()}"
        raise ConfigError(Problem(what, code="git.failed"))
    paths = (root / name for name in sorted(set(listed.stdout.split("\0")) - {""}))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every UTF-8 text file with its text; line endings are not translated."""
    for path in tree_files(root):
        data = path.read_bytes()
        if b"\0" not in data:
            yield path, data.decode("utf-8")
