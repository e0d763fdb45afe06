"""Set-up of the Python environment, before any package is installed: standard library only.

An environment of the user is only checked: nothing is installed into it.
"""

import sys

if not (3, 11) <= sys.version_info < (3, 14):
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"ERROR   Python 3.11, 3.12 or 3.13 is required, {sys.executable} is {version}")

import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from os.path import samefile
from pathlib import Path

from lib import console
from lib.console import log
from lib.env.packages import install_command, known_extras, missing_packages
from lib.errors import EXIT_DONE, ConfigError, Problem, RunError, escaped
from lib.files import file_lock
from lib.project import ROOT

# Marks a folder that make created, and may change or remove. The first line is the place (the
# scripts of an environment contain its path), empty while a set-up is unfinished; then the extras.
STAMP = ".kablate-stamp"


def main() -> int:
    parser = console.CommandLine(prog="python -m lib.env.setup", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--venv", metavar="DIR", help="the environment of make")
    target.add_argument("--active", metavar="PYTHON", help="the user's own interpreter")
    parser.add_argument("--extras", default="", help="names of extras in pyproject.toml")
    args = parser.parse_args()
    extras = args.extras.replace(",", " ").split()
    if unknown := sorted(set(extras) - set(known_extras())):
        expected = f"(expected {', '.join(known_extras())})"
        what = f"EXTRAS: unknown {', '.join(unknown)} {expected}"
        raise ConfigError(Problem(what, code="env.unknown-extra"))
    if args.active:
        check(args.active, extras)
    else:
        set_up(args.venv, extras)
    return EXIT_DONE


def check(python: str, extras: Sequence[str]) -> None:
    """Raise ConfigError, with the install command, if ``python`` (this process) is incomplete."""
    found = shutil.which(python)
    # A program that is not this process's interpreter, such as a shim, may be Python.
    is_python = found is not None and (
        samefile(found, sys.executable)
        or subprocess.run([found, "-ISc", ""], capture_output=True).returncode == 0
    )
    if not is_python:
        hint = "deactivate that environment, or use another: make PYTHON=/path/to/python"
        what = f"{python}: not {'Python' if found else 'executable'}"
        raise ConfigError(Problem(what, next=hint, code="env.no-interpreter"))
    missing = missing_packages(extras)
    # The first folder is the working directory.
    if str(ROOT) not in sys.path[1:]:
        missing.append("this tree (editable install)")
    if missing:
        what = f"{python} lacks {', '.join(missing)}"
        advice = shlex.join(install_command(sys.executable, extras))
        raise ConfigError(Problem(what, next=advice, code="env.missing-package"))


def set_up(folder: str, extras: Sequence[str]) -> None:
    """Create or complete the environment in ``folder`` with the pinned packages and ``extras``.

    Extras of earlier set-ups stay. An unfinished, moved or dead environment is created anew. Raises
    ConfigError for an environment that make did not create, and RunError if venv or pip fails.
    """
    venv = ROOT / folder
    venv.mkdir(parents=True, exist_ok=True)
    # The Makefile compares the place.
    stamp, place, waited = venv / STAMP, f"{ROOT} {folder}", False
    python = str(venv / "bin" / "python")
    if (venv / "bin").exists() and not stamp.exists():
        what, advice = f"{venv}: not created by make", f"type: make PYTHON={python}"
        raise ConfigError(Problem(what, next=advice, code="env.not-managed"))

    def on_wait() -> None:
        nonlocal waited
        waited = True
        log("SETUP", "another make is setting up; waiting for it")

    with file_lock(stamp, on_wait):
        first, *earlier = stamp.read_text(encoding="utf-8").split("\n")
        if waited and first == place and set(extras) <= set(earlier):
            return
        # An extra that has become a default package is no longer one.
        chosen = sorted({*extras, *earlier} & set(known_extras()))
        # In place, because the lock belongs to this file.
        stamp.write_text("\n".join(["", *chosen]), encoding="utf-8")
        if first != place or not Path(python).exists():
            _create(venv)
        # -I: ignore PYTHONPATH and PYTHONHOME, which are set for the programs that run later.
        _, *words = install_command(python, chosen)
        quiet = not console.is_verbose()
        if quiet:
            log("SETUP", "installing the packages (V=1 shows pip's lines)")
        _run([python, "-I", *words, "--disable-pip-version-check", "--no-input"], quiet=quiet)
        # pip may be configured to install elsewhere.
        checked = [python, "-I", "-m", "lib.env.setup", "--active", python]
        _run([*checked, "--extras", " ".join(chosen)])
        stamp.write_text("\n".join([place, *chosen, ""]), encoding="utf-8")
        log("SETUP", f"{venv} is ready")


def _create(venv: Path) -> None:
    """Create an empty environment from the base interpreter, removing what an earlier one left."""
    for path in venv.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != STAMP:
            path.unlink()
    # The versioned name: the environment is dead, not wrong, if the system changes its Python.
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    log("SETUP", f"creating {venv} with {base}; torch alone is 0.2 to 3 GB, once")
    _run([str(base if base.exists() else sys.executable), "-I", "-m", "venv", str(venv)])


def _run(command: Sequence[str], *, quiet: bool = False) -> None:
    """Run a command in the tree; ``quiet`` shows its last line. Raises RunError if it fails."""
    output = subprocess.PIPE if quiet else sys.stderr
    width, lines = console.terminal_columns(sys.stderr), deque[str](maxlen=40)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, errors="replace"
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if width:
                sys.stderr.write(f"\r\x1b[K{escaped(line.strip())[: width - 1]}")
    if quiet and width:
        sys.stderr.write("\r\x1b[K")
    if process.returncode:
        sys.stderr.write(escaped("".join(lines)))
        what = f"failed, see its messages above: {shlex.join(command)}"
        advice = "type: make setup; where venv is missing: sudo apt-get install python3-venv"
        raise RunError(Problem(what, next=advice, code="env.install-failed"))


if __name__ == "__main__":
    console.run_main(main)
