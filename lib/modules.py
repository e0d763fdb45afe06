"""Commands for modules that run in separate processes."""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``module`` with this interpreter."""
    # -P: do not import a folder called wandb in the working directory as the package.
    return [sys.executable, "-P", "-m", module, *arguments]
