"""The environment as files: what is installed, in the words of the tools that installed it.

Taken in the build folder and copied beside each run, so that a run's folder alone says what made
it. Every command's exit status is checked; the output has to read as what it should be.
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
# When it was taken, of what, and the digest of each file: written last.
INDEX = "snapshot.json"
# What the moment decides: no file of these makes two environments different.
VOLATILE = (INDEX, "hw.json", "nvidia_smi.txt", "rocm_smi.txt")


def refresh_snapshot(
    folder: Path, config: EnvironmentConfig, found: Interpreter, root: Path = ROOT
) -> None:
    """Take a snapshot into ``folder``, unless the one there is young enough and still true.

    PreflightError with all that cannot be found out, or written down.
    """
    packages, lock = installed(), root / config.lock_file
    # One that is not there is a condition of its own.
    locked = lock.is_file()
    facts = {
        "schema_version": SCHEMA_VERSION,
        "policy": config.policy,
        "environment": str(found),
        "prefix": str(found.prefix),
        "lock_file": {lock.name: sha256(lock)} if locked else {},
        "packages_digest": digest(packages),
    }
    if _is_current(folder, facts, config.snapshot_max_age_hours):
        return
    contents: dict[str, str | bytes] = {
        "packages.txt": listing(packages),
        "python_version.txt": f"Python {found.python}\n",
        "interpreter.json": json.dumps(_interpreter(found), sort_keys=True, indent=2) + "\n",
    }
    contents |= _answers(_questions(config, found))
    if locked:
        contents[lock.name] = lock.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            write_atomic(folder / name, text)
        digests = {name: sha256(folder / name) for name in contents}
        check = _pip_check(config, found)
        record = facts | {"files": digests, "pip_check": check, "taken_at": time.time()}
        write_json(folder / INDEX, record)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> PreflightError:
    """The refusal where a record of the environment cannot be written."""
    advice = "make it writable, or type: make O=DIR"
    what = f"the snapshot cannot be written: {error.strerror or error}"
    return PreflightError(Problem(what, str(error.filename or folder), advice))


def read_index(folder: Path) -> dict[str, Any]:
    """What ``snapshot.json`` says; empty where there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads((folder / INDEX).read_text())
        return found
    except (OSError, ValueError):
        return {}


def _is_current(folder: Path, facts: dict[str, Any], max_age_hours: int) -> bool:
    """Whether the snapshot is of these facts, not too old, and whole."""
    index = read_index(folder)
    if any(index.get(name) != value for name, value in facts.items()):
        return False
    age_hours = (time.time() - index["taken_at"]) / 3600
    # A time in the future is a clock that was wrong.
    if not 0 <= age_hours < max_age_hours:
        return False
    files = index["files"].items()
    return all((folder / name).is_file() and sha256(folder / name) == d for name, d in files)


def _interpreter(found: Interpreter) -> dict[str, Any]:
    """Facts of the interpreter that hold wherever it stands."""
    return {
        "kind": found.kind,
        "name": found.name,
        "version": sys.version,
        "implementation": platform.python_implementation(),
        "compiler": platform.python_compiler(),
        "cache_tag": sys.implementation.cache_tag,
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "platform": platform.platform(),
    }


def _questions(config: EnvironmentConfig, found: Interpreter) -> list[Question]:
    """What the policy's own tools are asked."""
    pip = (found.program, "-m", "pip", "--disable-pip-version-check")
    freeze = Question("pip_freeze.txt", (*pip, "freeze"), _is_freeze)
    if config.policy == "uv":
        return [Question("uv_version.txt", (_path("uv"), "--version"), _begins(r"uv \d"))]
    if config.policy == "venv":
        return [freeze] if find_spec("pip") else []
    if config.policy != "conda":
        return []
    conda, prefix = _path("conda"), str(found.prefix)
    # The list of packages leaves out what pip installed, and the history is no lock: all are needed.
    return [
        Question("conda_version.txt", (conda, "--version"), _begins(r"conda \d")),
        Question("pip_version.txt", (*pip, "--version"), _begins(r"pip \d")),
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
    """File → content. PreflightError with every question that has no answer."""
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


def _pip_check(config: EnvironmentConfig, found: Interpreter) -> dict[str, Any] | None:
    """What ``pip check`` says of requirements that do not go together: recorded, not judged.

    None where there is no pip, or the policy leaves packages alone.
    """
    if config.policy not in ("conda", "venv") or (config.policy == "venv" and not find_spec("pip")):
        return None
    command = (found.program, "-m", "pip", "--disable-pip-version-check", "check")
    code, output, errors = run(command)
    return {"exit_code": code, "output": (output + errors).splitlines()}


def _path(program: str) -> str:
    """Where it is; its bare name where it is not, so that the error says so."""
    return shutil.which(program) or program


def _begins(pattern: str) -> Any:
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
