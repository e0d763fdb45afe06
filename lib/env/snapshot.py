"""Execution of external programs whose output is recorded in a snapshot, with validation."""

import io
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lib.env.options import EnvironmentConfig
from lib.env.packages import (
    Interpreter,
    current_interpreter,
    format_packages,
    installed_packages,
    packages_digest,
)
from lib.errors import PreflightError, Problem
from lib.files import sha256_file, write_atomic, write_json
from lib.json_files import RecordError, read_json_object
from lib.project import ROOT
from lib.runs.run_dir import RunDir

# A solver that waits for the network would never finish.
_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class SnapshotCommand:
    """A command, the file for its output, and a predicate that validates the output."""

    file: str
    command: Sequence[str]
    reads: Callable[[str], bool]

    def output(self) -> str:
        """Run the command and return its output.

        Raises PreflightError if the command fails or its output is invalid.
        """
        command = shlex.join(self.command)
        code, output, errors = run_program(self.command)
        if code:
            last_line = (errors.strip() or output.strip() or "no message").splitlines()[-1]
            raise _error(f"{command} failed with exit code {code}: {last_line}", "program.failed")
        if not output.strip():
            raise _error(f"{command}: no output", "program.no-output")
        if not self.reads(output):
            first = output.splitlines()[0]
            what = f"{command}: invalid output for {self.file}, got {first!r}"
            raise _error(what, "program.invalid-output")
        return output


def run_program(command: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of ``command``.

    Raises PreflightError if the program cannot be started or times out.
    """
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{shlex.join(command)} cannot be run: {error}"
        raise _error(what, "program.cannot-run") from error
    return process.returncode, process.stdout, process.stderr


def _error(what: str, code: str) -> PreflightError:
    advice = "fix it, or skip the snapshot: RUN_PROFILE_MAXOUT_SPEED=y with ENV_SNAPSHOT=n"
    return PreflightError(Problem(f"snapshot: {what}", next=advice, code=code))


# Removal of secrets from program output before it is stored with a run.


# URLs of remotes and channels: https://TOKEN@host, ssh://user:PASSWORD@host, host/t/TOKEN/channel.
_RULES = (
    (re.compile(r"\b(https?|ftps?)://[^/\s]*@"), r"\1://"),
    (re.compile(r"://([^/\s:@]+):[^/\s]*@"), r"://\1@"),
    (re.compile(r"(://[^/\s]+/t/)[^/\s]+"), r"\1<TOKEN>"),
)
_VARIABLES = re.compile(r"^variables:", re.MULTILINE)


def redact_secrets(text: str) -> str:
    """Return ``text`` without credentials in URLs and without variables of a conda environment."""
    if _VARIABLES.search(text):
        document = yaml.safe_load(text)
        del document["variables"]
        text = yaml.safe_dump(document, sort_keys=False)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


class RedactingStream(io.TextIOWrapper):
    """Text stream that removes credentials from URLs."""

    def write(self, text: str) -> int:
        """Write ``text`` without credentials; return the length of the original text."""
        super().write(redact_secrets(text))
        return len(text)


# Snapshot of the environment: installed packages as reported by pip, conda or uv.
#
# The snapshot is taken in the build folder and copied to each run, so that the run's folder describes
# its environment completely. Exit status and output format of every command are checked.


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
    packages, lock = installed_packages(), root / config.lock_file
    # A missing lock file is reported by lock_problems.
    locked = lock.is_file()
    facts = {
        "schema_version": SCHEMA_VERSION,
        "policy": config.policy,
        "environment": str(interpreter),
        "prefix": str(interpreter.prefix),
        "lock_file": {lock.name: sha256_file(lock)} if locked else {},
        "packages_digest": packages_digest(packages),
    }
    if _is_current(folder, facts, config.snapshot_max_age_hours):
        return
    contents: dict[str, str | bytes] = {
        "packages.txt": format_packages(packages),
        "python_version.txt": f"Python {interpreter.python}\n",
        "interpreter.json": json.dumps(_interpreter(interpreter), sort_keys=True, indent=2) + "\n",
    }
    contents |= _outputs(_commands(config, interpreter))
    if locked:
        contents[lock.name] = lock.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            write_atomic(folder / name, text)
        digests = {name: sha256_file(folder / name) for name in contents}
        check = _pip_check(config, interpreter)
        record = facts | {"files": digests, "pip_check": check, "taken_at": time.time()}
        write_json(folder / INDEX, record)
    except OSError as error:
        raise write_error(folder, error) from error


def write_error(folder: Path, error: OSError) -> PreflightError:
    """Return the error for an environment record that cannot be written."""
    advice = "make it writable, or type: make O=DIR"
    what = f"cannot write the snapshot: {error.strerror or error}"
    path = str(error.filename or folder)
    return PreflightError(Problem(what, path, advice, code="disk.write-failed"))


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of ``snapshot.json``, or {} if the file is missing or unreadable."""
    try:
        return read_json_object(folder / INDEX)
    except RecordError:
        return {}


def _is_current(folder: Path, facts: dict[str, Any], max_age_hours: int) -> bool:
    """Return whether the snapshot matches ``facts``, is recent and is undamaged."""
    index = read_index(folder)
    if any(index.get(name) != value for name, value in facts.items()):
        return False
    taken_at, digests = index.get("taken_at"), index.get("files")
    # A damaged snapshot is taken again.
    if not isinstance(taken_at, int | float) or not isinstance(digests, dict):
        return False
    age_hours = (time.time() - taken_at) / 3600
    # A time in the future indicates a wrong clock.
    if not 0 <= age_hours < max_age_hours:
        return False
    files = digests.items()
    return all((folder / name).is_file() and sha256_file(folder / name) == d for name, d in files)


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


def _commands(config: EnvironmentConfig, interpreter: Interpreter) -> list[SnapshotCommand]:
    """Return the commands of the tools that belong to the policy."""
    pip = (interpreter.program, "-m", "pip", "--disable-pip-version-check")
    freeze = SnapshotCommand("pip_freeze.txt", (*pip, "freeze"), _is_freeze)
    if config.policy == "uv":
        return [
            SnapshotCommand("uv_version.txt", (_path("uv"), "--version"), _starts_with(r"uv \d"))
        ]
    if config.policy == "venv":
        return [freeze] if find_spec("pip") else []
    if config.policy != "conda":
        return []
    conda, prefix = _path("conda"), str(interpreter.prefix)
    # conda list omits packages installed by pip, the history has no versions: both are needed.
    return [
        SnapshotCommand("conda_version.txt", (conda, "--version"), _starts_with(r"conda \d")),
        SnapshotCommand("pip_version.txt", (*pip, "--version"), _starts_with(r"pip \d")),
        SnapshotCommand(
            "conda_env_from_history.yml",
            (conda, "env", "export", "--from-history", "-p", prefix),
            _is_environment,
        ),
        SnapshotCommand(
            "conda_list_explicit.txt",
            (conda, "list", "--explicit", "-p", prefix),
            lambda text: "@EXPLICIT" in text.splitlines(),
        ),
        freeze,
    ]


def _outputs(commands: Sequence[SnapshotCommand]) -> dict[str, str]:
    """Return the output of every command by the name of its file, without secrets.

    Raises PreflightError listing every command that failed.
    """
    outputs: dict[str, str] = {}
    problems: list[Problem] = []
    for command in commands:
        try:
            outputs[command.file] = redact_secrets(command.output())
        except PreflightError as error:
            problems += error.problems
    if problems:
        raise PreflightError(*problems)
    return outputs


def _pip_check(config: EnvironmentConfig, interpreter: Interpreter) -> dict[str, Any] | None:
    """Return the result of ``pip check``, which is recorded but refuses nothing.

    Returns None if pip is not installed or the policy does not use pip.
    """
    if config.policy not in ("conda", "venv") or (config.policy == "venv" and not find_spec("pip")):
        return None
    command = (interpreter.program, "-m", "pip", "--disable-pip-version-check", "check")
    code, output, errors = run_program(command)
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


# Record of the training environment in a run's folder and manifest.


def copy_snapshot(build_dir: Path, run: RunDir) -> None:
    """Copy the build folder's snapshot to the run's folder, replacing an earlier snapshot."""
    source, target = build_dir / FOLDER, run.environment
    names = {*read_index(source).get("files", ()), *VOLATILE}
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for name in sorted(names):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def observed_environment(run: RunDir | None = None, policy: str = "any") -> dict[str, Any]:
    """Return facts of the running environment and digests of the snapshot in the run's folder.

    ``policy`` is the configured policy; ``kind`` and ``name`` are detected. No fact depends on
    time.
    """
    interpreter = current_interpreter()
    packages = installed_packages()
    return {
        "policy": policy,
        "kind": interpreter.kind,
        "name": interpreter.name,
        "conda_env_name": interpreter.name if interpreter.kind == "conda" else None,
        "python": interpreter.python,
        "packages_digest": packages_digest(packages),
        "snapshot": {} if run is None else _digests(run, volatile=False),
    }


def hardware_digests(run: RunDir) -> dict[str, str]:
    """Return the digests of volatile files, which contain free disk space or temperatures."""
    return _digests(run, volatile=True)


def _digests(run: RunDir, volatile: bool) -> dict[str, str]:
    """Return file → SHA-256 of the snapshot in the run's folder."""
    files = sorted(run.environment.glob("*")) if run.environment.is_dir() else []
    selected = (path for path in files if (path.name in VOLATILE) == volatile)
    return {path.name: sha256_file(path) for path in selected if not path.name.startswith(".")}
