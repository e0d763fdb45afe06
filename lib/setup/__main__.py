"""Make an interpreter ready for this tree, or say in one command what it lacks.

make runs this before every target. With --venv, the folder is created and filled as needed. With
--active, that interpreter is the user's own: nothing is installed.
"""

import sys

if sys.version_info < (3, 11):
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"ERROR   Python 3.11 or newer is needed, {sys.executable} is {found}")

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from lib import cli
from lib.console import say
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.project import ROOT
from lib.setup.interpreter import import_path, install_command, look
from lib.setup.requirements import default_requirements, extra_requirements
from lib.setup.virtualenv import VirtualEnvironment


def main() -> int:
    """Set up as the command line says. ConfigError where the user has to act."""
    parser = argparse.ArgumentParser(prog="python -m lib.setup", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--venv", type=Path, metavar="DIR", help="the environment make looks after")
    target.add_argument("--active", metavar="PYTHON", help="the user's own interpreter")
    parser.add_argument("--extras", default="", help="names of extras in pyproject.toml")
    args = parser.parse_args()
    extras = args.extras.replace(",", " ").split()
    if args.active:
        _check(args.active, extras)
        return EXIT_DONE
    venv = VirtualEnvironment(args.venv.absolute(), ROOT)
    if not venv.is_ours():
        _check(str(venv.python), extras)
    elif not venv.is_current(extras):
        venv.bring_up(extras)
    return EXIT_DONE


def _check(python: str, extras: Sequence[str]) -> None:
    """ConfigError with the one command to type where ``python``, which runs this, lacks something."""
    if shutil.which(python) is None:
        hint = "leave that environment, or name another: make PYTHON=/path/to/python"
        raise ConfigError(Problem(f"{python} cannot be run", next=hint))
    requirements = default_requirements(ROOT) + extra_requirements(ROOT, extras)
    findings = look(ROOT, requirements, import_path())
    if not findings.complete:
        problem = f"{python} lacks {findings.describe_lacking()}"
        raise ConfigError(Problem(problem, next=install_command(ROOT, findings)))
    if findings.differing:
        say("SETUP", f"accepted in {python}: {findings.describe_differing()}")


cli.run(main)
