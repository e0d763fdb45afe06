"""What the configuration asks of the environment, each condition with a message of its own.

Imports no torch, and no program is asked: the answers are in the interpreter's and the tree's files.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from lib.environment.detect import Interpreter
from lib.environment.lock import lock_differences
from lib.environment.options import EnvironmentConfig
from lib.environment.packages import installed
from lib.errors import ConfigError, Problem
from lib.project import ROOT
from lib.setup.interpreter import import_path, install_command, look
from lib.setup.requirements import default_requirements

# Traces of tools that a house rule of conda alone forbids.
FOREIGN = (".venv", "uv.lock", "poetry.lock", "Pipfile")
_GIB = 1024**3
_DOCUMENT = "how to make one: docs/environment.md"


def environment_problems(
    config: EnvironmentConfig, found: Interpreter, variables: Mapping[str, str] = os.environ
) -> list[Problem]:
    """Another kind of environment than ``ENV_POLICY``, another name, or one not activated."""
    if config.policy == "any":
        return []
    if found.kind != config.policy:
        what = f"ENV_POLICY={config.policy}, but {found.program} belongs to {_kind(found)}"
        return [Problem(what, next=_DOCUMENT)]
    problems = []
    if config.name and found.name != config.name:
        what = f"ENV_NAME={config.name}, but the environment is {found.name} ({found.prefix})"
        problems.append(Problem(what, next=_DOCUMENT))
    # Its activation sets what libraries outside Python read.
    active = variables.get("CONDA_PREFIX", "")
    if config.policy == "conda" and Path(active or "/").resolve() != found.prefix.resolve():
        what = f"CONDA_PREFIX is {active!r}, but the interpreter's environment is {found.prefix}"
        problems.append(Problem(what, next=f"type: conda activate {found.name}"))
    return problems


def python_problems(config: EnvironmentConfig, found: Interpreter) -> list[Problem]:
    """Another Python than ``ENV_PYTHON``."""
    if not config.python or f"{found.python}.".startswith(f"{config.python}."):
        return []
    what = f"ENV_PYTHON={config.python}, but {found.program} is Python {found.python}"
    return [Problem(what, next=_DOCUMENT)]


def package_problems() -> list[Problem]:
    """What the tree needs and this interpreter lacks."""
    findings = look(ROOT, default_requirements(ROOT), import_path())
    if not findings.lacking:
        return []
    what = f"{sys.executable} lacks {findings.describe_lacking()}"
    return [Problem(what, next=install_command(ROOT, findings))]


def foreign_problems(config: EnvironmentConfig, root: Path = ROOT) -> list[Problem]:
    """Traces of other tools than conda in the tree."""
    if not config.forbid_foreign:
        return []
    remedies = {".venv": "type: make mrproper, which removes one that make has made"}
    return [
        Problem(
            f"ENV_FORBID_FOREIGN=y, but there is {name}",
            str(root / name),
            remedies.get(name, "remove it"),
        )
        for name in FOREIGN
        if os.path.lexists(root / name)
    ]


def lock_problems(config: EnvironmentConfig, root: Path = ROOT) -> list[Problem]:
    """A lock file that is absent or unreadable, or that says otherwise than what is installed."""
    if not config.lock_file:
        return []
    path = root / config.lock_file
    try:
        differences = lock_differences(path, installed())
    except FileNotFoundError:
        return [Problem("ENV_LOCK_FILE is not there", str(path), "type: uv lock")]
    except ConfigError as error:
        return list(error.problems)
    if not differences or not config.lock_enforce:
        return []
    named = ", ".join(differences[:5]) + (" …" if len(differences) > 5 else "")
    what = f"ENV_LOCK_ENFORCE=y, but {len(differences)} packages differ: {named}"
    return [Problem(what, str(path), "type: uv sync, or uv pip sync with the lock file")]


def disk_problems(config: EnvironmentConfig, folder: Path) -> list[Problem]:
    """Less space where ``folder`` is, or will be, than ``MIN_DISK_GIB``."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free / _GIB
    if free >= config.min_disk_gib:
        return []
    what = f"MIN_DISK_GIB={config.min_disk_gib}, but {free:.1f} GiB are free"
    return [Problem(what, str(existing), "free some space, or set OUTPUT_DIR")]


def _kind(found: Interpreter) -> str:
    if found.kind == "system":
        return f"no environment ({found.prefix})"
    return f"a {found.kind} environment ({found.prefix})"
