"""The command make, in this tree or another one, with the interpreter of the tests."""

import os
import subprocess
import sys

from lib.project import ROOT
from tests.source import MAKE_VARIABLES

# The variables of an active environment, whose interpreter make uses.
ACTIVE = {"VIRTUAL_ENV", "CONDA_PREFIX"}


def interpreter():
    """Return the interpreter of make."""
    return sys.executable


def make(*words, cwd=ROOT, **variables):
    """Run make in an environment without make's settings.

    Unless the words name another one, the interpreter is ``interpreter``, whose packages are complete.
    """
    unset = ACTIVE | {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    unset |= MAKE_VARIABLES
    environment = {k: v for k, v in os.environ.items() if k not in unset} | variables
    more = []
    if not any(word.startswith("PYTHON=") for word in words) and not set(variables) & ACTIVE:
        dry = words[:1] == ("-n",)
        more = [f"PYTHON={sys.executable if dry else interpreter()}"]
        more += [] if dry or "setup" in words else ["-o", "setup"]
    return subprocess.run(
        ["make", *words, *more],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
