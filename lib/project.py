"""Location of the source tree, so that scripts run from any folder."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


# Commands for modules that run in separate processes.


def python_module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``module`` with this interpreter."""
    # -P: do not import a folder called wandb in the working directory as the package.
    return [sys.executable, "-P", "-m", module, *arguments]
