"""Detection of the environment of the running interpreter from its folder, not from variables.

A variable such as CONDA_DEFAULT_ENV can be set by anybody and stays set outside its environment.
"""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the environment of its packages."""

    # conda, uv, venv or system.
    kind: str
    # Last component of the path; "base" for the installation folder of conda.
    name: str
    # Full version, such as 3.13.1.
    python: str
    prefix: Path
    program: str = sys.executable

    def __str__(self) -> str:
        return f"{self.kind} {self.name}, Python {self.python}"


def running(
    prefix: Path = Path(sys.prefix),
    base_prefix: Path = Path(sys.base_prefix),
    program: str = sys.executable,
) -> Interpreter:
    """Return the interpreter of the environment ``prefix``, created from the one in
    ``base_prefix``.

    uv records its version in pyvenv.cfg, and conda creates a folder conda-meta in each environment.
    A virtual environment created from conda's Python counts as a virtual environment.
    """
    keys = _pyvenv_keys(prefix) if prefix != base_prefix else set()
    if keys:
        kind = "uv" if "uv" in keys else "venv"
    else:
        kind = "conda" if (prefix / "conda-meta").is_dir() else "system"
    # Only the installation folder of conda contains condabin.
    is_base = kind == "conda" and (prefix / "condabin").is_dir()
    name = "base" if is_base else prefix.name
    return Interpreter(kind, name, platform.python_version(), prefix, program)


def _pyvenv_keys(prefix: Path) -> set[str]:
    """Return the keys of pyvenv.cfg; empty if the folder is not a virtual environment."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line.split("=", 1)[0].strip().lower() for line in lines if "=" in line}
