"""Set up the Python environment of this tree, or print the command that completes it.

make runs this before every target. With --venv, the folder is created and filled as needed. With
--active, the interpreter belongs to the user: nothing is installed.
"""

import sys

if sys.version_info < (3, 11):
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"ERROR   Python 3.11 or newer is required, {sys.executable} is {version}")

import shutil
import subprocess
from collections.abc import Sequence
from os.path import samefile
from pathlib import Path

from lib import console
from lib.console import log
from lib.env.python_env import (
    VirtualEnvironment,
    check_requirements,
    default_requirements,
    extra_requirements,
    import_path,
    install_command,
)
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.project import ROOT


def main() -> int:
    """Set up the environment from the command line. Raises ConfigError if the user has to act."""
    parser = console.CommandLine(prog="python -m lib.env", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--venv", type=Path, metavar="DIR", help="the environment make manages")
    target.add_argument("--active", metavar="PYTHON", help="the user's own interpreter")
    parser.add_argument("--extras", default="", help="names of extras in pyproject.toml")
    parser.add_argument("--share", default="", metavar="DIR", help="an environment to build upon")
    args = parser.parse_args()
    extras = args.extras.replace(",", " ").split()
    shared = str(Path(args.share).resolve()) if args.share else ""
    venv = None if args.active else VirtualEnvironment(args.venv.absolute(), ROOT)
    if venv is None or not venv.is_ours():
        if shared:
            what = "make does not manage the environment in use (expected no active environment)"
            raise ConfigError(Problem(what, "VENV", "deactivate", code="env.not-managed"))
        _check(args.active or str(args.venv.absolute() / "bin" / "python"), extras)
    elif not venv.is_current(extras, shared):
        venv.bring_up(extras, shared)
    return EXIT_DONE


def _check(python: str, extras: Sequence[str]) -> None:
    """Raise ConfigError, with the install command, if ``python`` (this process) is incomplete."""
    found = shutil.which(python)
    if found is None or not (samefile(found, sys.executable) or _is_python(found)):
        hint = "deactivate that environment, or use another: make PYTHON=/path/to/python"
        what = f"{python}: not {'Python' if found else 'executable'}"
        raise ConfigError(Problem(what, next=hint, code="env.no-interpreter"))
    requirements = default_requirements(ROOT) + extra_requirements(ROOT, extras)
    findings = check_requirements(ROOT, requirements, import_path())
    if not findings.complete:
        what = f"{python} lacks {findings.describe_lacking()}"
        command = install_command(ROOT, findings)
        raise ConfigError(Problem(what, next=command, code="env.missing-package"))
    if findings.differing:
        log("SETUP", f"{python} has untested versions: {findings.describe_differing()}")


def _is_python(program: str) -> bool:
    """Return whether a program that is not this process's interpreter, such as a shim, is Python."""
    return subprocess.run([program, "-ISc", ""], capture_output=True).returncode == 0


console.run_main(main)
