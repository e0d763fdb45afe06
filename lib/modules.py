"""Modules that run in processes of their own."""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """This interpreter with ``-m module`` and its arguments."""
    # -P: a folder called wandb in the working directory is not the package.
    return [sys.executable, "-P", "-m", module, *arguments]
