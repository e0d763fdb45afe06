"""Snapshot of the environment: installed packages as reported by pip, conda or uv.

The snapshot is taken in the build folder and copied to each run, so that the run's folder describes
its environment completely. Exit status and output format of every command are checked.
"""

import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lib.environment.detect import Interpreter
from lib.environment.options import EnvironmentConfig
from lib.environment.packages import digest, installed, listing
from lib.environment.programs import Question, run
from lib.environment.redact import without_secrets
from lib.errors import PreflightError, Problem
from lib.files import sha256, write_atomic, write_json
from lib.project import ROOT

SCHEMA_VERSION = 2
FOLDER = "environment"
# Time, facts and the digest of each file; written last.
INDEX = "snapshot.json"
# Files that depend on time; ignored when environments are compared.
VOLATILE = (INDEX, "hw.json", "nvidia_smi.txt", "rocm_smi.txt")


def refresh_snapshot(
    folder: Path, config: EnvironmentConfig, interpreter: Interpreter, root: Path = ROOT
) -> None:
    """Take a snapshot in ``folder``, unless the existing one is recent and still valid.

    Raises PreflightError listing every command that failed, or if the folder is not writable.
    """
    packages, lock = installed(), root / config.lock_file
    # A missing lock file is reported by lock_problems.
    locked = lock.is_file()
    facts = {
        "schema_version": SCHEMA_VERSION,
        "policy": config.policy,
        "environment": str(interpreter),
        "prefix": str(interpreter.prefix),
        "lock_file": {lock.name: sha256(lock)} if locked else {},
        "packages_digest": digest(packages),
    }
    if _is_current(folder, facts, config.snapshot_max_age_hours):
        return
    contents: dict[str, str | bytes] = {
        "packages.txt": listing(packages),
        "python_version.txt": f"Python {interpreter.python}\n",
        "interpreter.json": json.dumps(_interpreter(interpreter), sort_keys=True, indent=2) + "\n",
    }
    contents |= _answers(_questions(config, interpreter))
    if locked:
        contents[lock.name] = lock.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            write_atomic(folder / name, text)
        digests = {name: sha256(folder / name) for name in contents}
        check = _pip_check(config, interpreter)
        record = facts | {"files": digests, "pip_check": check, "taken_at": time.time()}
        write_json(folder / INDEX, record)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> PreflightError:
    """Return the error for an environment record that cannot be written."""
    advice = "make it writable, or type: make O=DIR"
    what = f"cannot write the snapshot: {error.strerror or error}"
    path = str(error.filename or folder)
    return PreflightError(Problem(what, path, advice, code="snapshot.write-failed"))


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of ``snapshot.json``, or {} if the file is missing or unreadable."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        return index
    except (OSError, ValueError):
        return {}


def _is_current(folder: Path, facts: dict[str, Any], max_age_hours: int) -> bool:
    """Return whether the snapshot matches ``facts``, is recent and is undamaged."""
    index = read_index(folder)
    if any(index.get(name) != value for name, value in facts.items()):
        return False
    age_hours = (time.time() - index["taken_at"]) / 3600
    # A time in the future indicates a wrong clock.
    if not 0 <= age_hours < max_age_hours:
        return False
    files = index["files"].items()
    return all((folder / name).is_file() and sha256(folder / name) == d for name, d in files)


def _interpreter(interpreter: Interpreter) -> dict[str, Any]:
    """Return facts of the interpreter that do not depend on its location."""
    return {
        "kind": interpreter.kind,
        "name": interpreter.name,
        "version": sys.version,
        "implementation": platform.python_implementation(),
        "compiler": platform.python_compiler(),
        "cache_tag": sys.implementation.cache_tag,
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "platform": platform.platform(),
    }


def _questions(config: EnvironmentConfig, interpreter: Interpreter) -> list[Question]:
    """Return the commands of the tools that belong to the policy."""
    pip = (interpreter.program, "-m", "pip", "--disable-pip-version-check")
    freeze = Question("pip_freeze.txt", (*pip, "freeze"), _is_freeze)
    if config.policy == "uv":
        return [Question("uv_version.txt", (_path("uv"), "--version"), _starts_with(r"uv \d"))]
    if config.policy == "venv":
        return [freeze] if find_spec("pip") else []
    if config.policy != "conda":
        return []
    conda, prefix = _path("conda"), str(interpreter.prefix)
    # conda list omits packages installed by pip, the history has no versions: both are needed.
    return [
        Question("conda_version.txt", (conda, "--version"), _starts_with(r"conda \d")),
        Question("pip_version.txt", (*pip, "--version"), _starts_with(r"pip \d")),
        Question(
            "conda_env_from_history.yml",
            (conda, "env", "export", "--from-history", "-p", prefix),
            _is_environment,
        ),
        Question(
            "conda_list_explicit.txt",
            (conda, "list", "--explicit", "-p", prefix),
            lambda text: "@EXPLICIT" in text.splitlines(),
        ),
        freeze,
    ]


def _answers(questions: Sequence[Question]) -> dict[str, str]:
    """Return file → output.

    Raises PreflightError listing every command that failed.
    """
    answers: dict[str, str] = {}
    problems: list[Problem] = []
    for question in questions:
        try:
            answers[question.file] = without_secrets(question.answer())
        except PreflightError as error:
            problems += error.problems
    if problems:
        raise PreflightError(*problems)
    return answers


def _pip_check(config: EnvironmentConfig, interpreter: Interpreter) -> dict[str, Any] | None:
    """Return the result of ``pip check``, which is recorded but refuses nothing.

    Returns None if pip is not installed or the policy does not use pip.
    """
    if config.policy not in ("conda", "venv") or (config.policy == "venv" and not find_spec("pip")):
        return None
    command = (interpreter.program, "-m", "pip", "--disable-pip-version-check", "check")
    code, output, errors = run(command)
    return {"exit_code": code, "output": (output + errors).splitlines()}


def _path(program: str) -> str:
    """Return the path of ``program``, or its bare name if missing, for the error message."""
    return shutil.which(program) or program


def _starts_with(pattern: str) -> Any:
    return lambda text: re.match(pattern, text) is not None


def _is_freeze(text: str) -> bool:
    """Lines ``name==version``, ``name @ address``, ``-e address`` and comments."""
    lines = (line.strip() for line in text.splitlines())
    return all(re.match(r"#|-e |[\w.-]+ ?(==|===|@)", line) for line in lines if line)


def _is_environment(text: str) -> bool:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return isinstance(document, dict) and "dependencies" in document
