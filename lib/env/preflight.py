"""Checks of the environment against the configuration, one function per condition.

Imports no torch and starts no program: only files of the interpreter and of the tree are read.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from lib.env.options import EnvironmentConfig
from lib.env.packages import Interpreter, installed_packages, lock_differences
from lib.env.python_env import (
    check_requirements,
    default_requirements,
    import_path,
    install_command,
)
from lib.errors import ConfigError, Problem
from lib.project import ROOT

# Files of other package managers, refused by ENV_FORBID_FOREIGN.
FOREIGN_FILES = (".venv", "uv.lock", "poetry.lock", "Pipfile")
_GIB = 1024**3
_ADVICE = "see docs/environment.md"


def environment_problems(
    config: EnvironmentConfig, interpreter: Interpreter, variables: Mapping[str, str] = os.environ
) -> list[Problem]:
    """Check the kind, name and activation of the environment against ``ENV_POLICY``."""
    if config.policy == "any":
        return []
    if interpreter.kind != config.policy:
        environment = _describe_kind(interpreter)
        what = f"ENV_POLICY={config.policy}: {interpreter.program} belongs to {environment}"
        return [Problem(what, next=_ADVICE, code="env.wrong-kind")]
    problems = []
    if config.name and interpreter.name != config.name:
        what = f"ENV_NAME={config.name}: environment is {interpreter.name} ({interpreter.prefix})"
        problems.append(Problem(what, next=_ADVICE, code="env.wrong-name"))
    # Activation sets variables that libraries outside Python read.
    active = variables.get("CONDA_PREFIX", "")
    if config.policy == "conda" and Path(active or "/").resolve() != interpreter.prefix.resolve():
        values = f"expected CONDA_PREFIX={interpreter.prefix}, got {active!r}"
        what = f"environment not activated ({values})"
        advice = f"type: conda activate {interpreter.name}"
        problems.append(Problem(what, next=advice, code="env.not-activated"))
    return problems


def python_problems(config: EnvironmentConfig, interpreter: Interpreter) -> list[Problem]:
    """Check the Python version against ``ENV_PYTHON``."""
    if not config.python or f"{interpreter.python}.".startswith(f"{config.python}."):
        return []
    what = f"ENV_PYTHON={config.python}: {interpreter.program} is Python {interpreter.python}"
    return [Problem(what, next=_ADVICE, code="env.wrong-python")]


def package_problems() -> list[Problem]:
    """Check that all required packages are installed."""
    findings = check_requirements(ROOT, default_requirements(ROOT), import_path())
    if not findings.lacking:
        return []
    what = f"packages missing in {sys.executable}: {findings.describe_lacking()}"
    return [Problem(what, next=install_command(ROOT, findings), code="env.missing-package")]


def foreign_problems(config: EnvironmentConfig, root: Path = ROOT) -> list[Problem]:
    """Check that the tree contains no files of package managers other than conda."""
    if not config.forbid_foreign:
        return []
    remedies = {".venv": "type: make mrproper (removes a .venv created by make)"}
    return [
        Problem(
            f"ENV_FORBID_FOREIGN=y: found {name}",
            str(root / name),
            remedies.get(name, "remove it"),
            code="env.foreign-file",
        )
        for name in FOREIGN_FILES
        if os.path.lexists(root / name)
    ]


def lock_problems(config: EnvironmentConfig, root: Path = ROOT) -> list[Problem]:
    """Check that the lock file is readable and matches the installed packages."""
    if not config.lock_file:
        return []
    path = root / config.lock_file
    try:
        differences = lock_differences(path, installed_packages())
    except FileNotFoundError:
        what = "ENV_LOCK_FILE: file not found"
        return [Problem(what, str(path), "type: uv lock", code="lock-file.missing")]
    except ConfigError as error:
        return list(error.problems)
    if not differences or not config.lock_enforce:
        return []
    shown = ", ".join(differences[:5]) + (" …" if len(differences) > 5 else "")
    what = f"ENV_LOCK_ENFORCE=y: {len(differences)} packages differ: {shown}"
    advice = "type: uv sync, or uv pip sync with the lock file"
    return [Problem(what, str(path), advice, code="lock-file.mismatch")]


def disk_problems(config: EnvironmentConfig, folder: Path) -> list[Problem]:
    """Check that the file system of ``folder`` has ``MIN_DISK_GIB`` of free space."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free / _GIB
    if free >= config.min_disk_gib:
        return []
    what = f"MIN_DISK_GIB={config.min_disk_gib}: not enough disk space ({free:.1f} GiB free)"
    advice = "free some space, or set OUTPUT_DIR"
    return [Problem(what, str(existing), advice, code="disk.no-space")]


def output_problems(folder: Path, bytes_needed: int) -> list[Problem]:
    """Return the reasons why ``bytes_needed`` bytes of results cannot be written to ``folder``.

    ``folder`` may be missing; the nearest existing parent is checked.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        advice = "type: SET='OUTPUT_DIR=\"…\"'"
        return [Problem("not a folder", str(existing), advice, code="output.not-a-folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "make it writable, or set OUTPUT_DIR to another folder"
        return [Problem("not writable", str(existing), advice, code="output.not-writable")]
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        sizes = f"{bytes_needed / 2**20:,.0f} MiB needed, {free / 2**20:,.0f} MiB free"
        what, advice = f"not enough disk space ({sizes})", "free some space, or set OUTPUT_DIR"
        return [Problem(what, str(existing), advice, code="disk.no-space")]
    return []


def _describe_kind(interpreter: Interpreter) -> str:
    if interpreter.kind == "system":
        return f"no environment ({interpreter.prefix})"
    return f"a {interpreter.kind} environment ({interpreter.prefix})"
