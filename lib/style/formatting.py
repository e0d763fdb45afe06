"""Python formatting with black, configured in ``pyproject.toml``."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lib.errors import Problem
from lib.modules import module_command
from lib.style.files import tree_files


def black_problems(root: Path) -> list[Problem]:
    """Return one problem for each file that black would change or cannot parse."""
    return [
        Problem(line, code="style.unformatted")
        for line in _run(root, ["--check"])
        if line.startswith(("would", "error"))
    ]


def reformat(root: Path) -> list[str]:
    """Reformat the tree with black and return its messages."""
    return [line for line in _run(root, []) if line.startswith(("reformatted", "error"))]


def _run(root: Path, options: Sequence[str]) -> list[str]:
    files = [str(path.relative_to(root)) for path in tree_files(root) if path.suffix == ".py"]
    command = module_command("black", *options, *files)
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    ).stderr.splitlines()
