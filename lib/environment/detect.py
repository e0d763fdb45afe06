"""Which environment the running interpreter belongs to: its own folder says, and no variable does.

A variable such as CONDA_DEFAULT_ENV outlives the environment that set it, and anybody can set it.
"""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Interpreter:
    """The interpreter, and the environment that its packages come from."""

    # conda, uv, venv or system
    kind: str
    # Last part of the environment's path; "base" for the folder that conda itself is installed in.
    name: str
    # Such as 3.13.1.
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
    """The interpreter whose environment is ``prefix``, made from that in ``base_prefix``.

    uv writes its version into pyvenv.cfg, and conda a folder conda-meta into each environment. A
    virtual environment made from conda's Python is a virtual environment.
    """
    keys = _pyvenv_keys(prefix) if prefix != base_prefix else set()
    if keys:
        kind = "uv" if "uv" in keys else "venv"
    else:
        kind = "conda" if (prefix / "conda-meta").is_dir() else "system"
    # Only conda's own folder holds the program that the others are activated with.
    is_base = kind == "conda" and (prefix / "condabin").is_dir()
    name = "base" if is_base else prefix.name
    return Interpreter(kind, name, platform.python_version(), prefix, program)


def _pyvenv_keys(prefix: Path) -> set[str]:
    """The keys of pyvenv.cfg; none where the folder is no virtual environment."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line.split("=", 1)[0].strip().lower() for line in lines if "=" in line}
