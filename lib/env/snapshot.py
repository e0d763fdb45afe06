"""Snapshot of the environment: installed packages as reported by pip, conda or uv, without credentials.

It is taken in the build folder, and copied to each run.
"""

import io
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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

SCHEMA_VERSION = 2
FOLDER = "environment"
# Time, facts and the digest of each file; written last.
INDEX = "snapshot.json"
# Files that depend on time; ignored when environments are compared.
VOLATILE = (INDEX, "hw.json", "nvidia_smi.txt", "rocm_smi.txt")
# A solver that waits for the network would never finish.
_TIMEOUT_SECONDS = 120


def refresh_snapshot(
    folder: Path, config: EnvironmentConfig, interpreter: Interpreter, root: Path = ROOT
) -> None:
    """Take a snapshot in ``folder`` unless the existing one is valid. Raises PreflightError."""
    packages, lock = installed_packages(), root / config.lock_file
    # A missing lock file is a problem of its own.
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
    # Facts of the interpreter that do not depend on its location.
    described = {
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
    contents: dict[str, str | bytes] = {
        "packages.txt": format_packages(packages),
        "python_version.txt": f"Python {interpreter.python}\n",
        "interpreter.json": json.dumps(described, sort_keys=True, indent=2) + "\n",
    }
    contents |= _outputs(_commands(config.policy, interpreter))
    if locked:
        contents[lock.name] = lock.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            write_atomic(folder / name, text)
        digests = {name: sha256_file(folder / name) for name in contents}
        check = _pip_check(config.policy, interpreter)
        record = facts | {"files": digests, "pip_check": check, "taken_at": time.time()}
        write_json(folder / INDEX, record)
    except OSError as error:
        raise write_error(folder, error) from error


def write_error(folder: Path, error: OSError) -> PreflightError:
    advice = "make it writable, or type: make O=DIR"
    what = f"cannot write the snapshot: {error.strerror or error}"
    path = str(error.filename or folder)
    return PreflightError(Problem(what, path, advice, code="disk.write-failed"))


def _is_current(folder: Path, facts: dict[str, Any], max_age_hours: int) -> bool:
    """Return whether the snapshot matches ``facts``, is recent and is undamaged."""
    index = _read_index(folder)
    taken_at, digests = index.get("taken_at"), index.get("files")
    # A damaged snapshot is taken again.
    if not isinstance(taken_at, int | float) or not isinstance(digests, dict):
        return False
    # A time in the future indicates a wrong clock.
    is_recent = 0 <= (time.time() - taken_at) / 3600 < max_age_hours
    files = {name: sha256_file(folder / name) for name in digests if (folder / name).is_file()}
    return is_recent and digests == files and index.items() >= facts.items()


def _read_index(folder: Path) -> dict[str, Any]:
    """Return the content of ``snapshot.json``, or {} if the file is missing or unreadable."""
    try:
        return read_json_object(folder / INDEX)
    except RecordError:
        return {}


def _commands(policy: str, interpreter: Interpreter) -> dict[str, tuple[Sequence[str], str]]:
    """Return file → the command whose output it is, and a pattern that the output matches."""
    pip = (interpreter.program, *_PIP)
    prefix = ("-p", str(interpreter.prefix))
    freeze = {"pip_freeze.txt": ((*pip, "freeze"), r"#|-e |[\w.-]+ ?(==|===|@)")}
    history = ("conda", "env", "export", "--from-history", *prefix)
    # conda list omits packages installed by pip, the history has no versions: both are needed.
    conda = {
        "conda_version.txt": (("conda", "--version"), r"conda \d"),
        "pip_version.txt": ((*pip, "--version"), r"pip \d"),
        "conda_env_from_history.yml": (history, r"(?ms).*^dependencies:"),
        "conda_list_explicit.txt": (
            ("conda", "list", "--explicit", *prefix),
            r"(?ms).*^@EXPLICIT$",
        ),
    }
    commands: dict[str, dict[str, tuple[Sequence[str], str]]] = {
        "any": {},
        "uv": {"uv_version.txt": (("uv", "--version"), r"uv \d")},
        "venv": {**freeze} if find_spec("pip") else {},
        "conda": {**conda, **freeze},
    }
    return commands[policy]


def _outputs(commands: Mapping[str, tuple[Sequence[str], str]]) -> dict[str, str]:
    """Return the output of every command. Raises PreflightError listing every one that failed."""
    outputs: dict[str, str] = {}
    problems: list[Problem] = []
    for file, (command, pattern) in commands.items():
        shown = shlex.join(command)
        try:
            code, output, errors = run_program(command)
        except PreflightError as error:
            problems += error.problems
            continue
        if code:
            last_line = (errors.strip() or output.strip() or "no message").splitlines()[-1]
            what = f"{shown} failed with exit code {code}: {last_line}"
            problems.append(_problem(what, "program.failed"))
        elif not output.strip():
            problems.append(_problem(f"{shown}: no output", "program.no-output"))
        elif not re.match(pattern, output):
            what = f"{shown}: invalid output for {file}, got {output.splitlines()[0]!r}"
            problems.append(_problem(what, "program.invalid-output"))
        outputs[file] = redact_secrets(output)
    if problems:
        raise PreflightError(*problems)
    return outputs


_PIP = ("-m", "pip", "--disable-pip-version-check")


def _pip_check(policy: str, interpreter: Interpreter) -> dict[str, Any] | None:
    """Return the result of ``pip check``, which refuses nothing; None if the policy has no pip."""
    if policy != "conda" and not (policy == "venv" and find_spec("pip")):
        return None
    code, output, errors = run_program((interpreter.program, *_PIP, "check"))
    return {"exit_code": code, "output": (output + errors).splitlines()}


def run_program(command: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr. Raises PreflightError if it cannot run or times out."""
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
        raise PreflightError(_problem(what, "program.cannot-run")) from error
    return process.returncode, process.stdout, process.stderr


def _problem(what: str, code: str) -> Problem:
    advice = "fix it, or skip the snapshot: RUN_PROFILE_MAXOUT_SPEED=y with ENV_SNAPSHOT=n"
    return Problem(f"snapshot: {what}", next=advice, code=code)


# URLs of remotes and channels: https://TOKEN@host, ssh://user:PASSWORD@host, host/t/TOKEN/channel;
# and the variables of a conda environment, a block of YAML.
_SECRETS = (
    (re.compile(r"\b(https?|ftps?)://[^/\s]*@"), r"\1://"),
    (re.compile(r"://([^/\s:@]+):[^/\s]*@"), r"://\1@"),
    (re.compile(r"(://[^/\s]+/t/)[^/\s]+"), r"\1<TOKEN>"),
    (re.compile(r"(?m)^variables:.*\n?(?:[ \t].*\n?|\n)*"), ""),
)


def redact_secrets(text: str) -> str:
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class RedactingStream(io.TextIOWrapper):
    """Text stream that removes credentials from URLs."""

    def write(self, text: str) -> int:
        """Write ``text`` without credentials; return the length of the original text."""
        super().write(redact_secrets(text))
        return len(text)


def copy_snapshot(build_dir: Path, run: RunDir) -> None:
    """Copy the build folder's snapshot to the run's folder, replacing an earlier snapshot."""
    source, target = build_dir / FOLDER, run.environment
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for name in sorted({*_read_index(source).get("files", ()), *VOLATILE}):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def observed_environment(run: RunDir, policy: str) -> dict[str, Any]:
    """Return the configured ``policy``, the detected environment, and digests of the run's snapshot."""
    here = current_interpreter()
    return {
        "policy": policy,
        "kind": here.kind,
        "name": here.name,
        "conda_env_name": here.name if here.kind == "conda" else None,
        "python": here.python,
        "packages_digest": packages_digest(installed_packages()),
        "snapshot": _digests(run, volatile=False),
    }


def hardware_digests(run: RunDir) -> dict[str, str]:
    """Return the digests of volatile files, which contain free disk space or temperatures."""
    return _digests(run, volatile=True)


def _digests(run: RunDir, volatile: bool) -> dict[str, str]:
    files = sorted(run.environment.glob("[!.]*")) if run.environment.is_dir() else []
    return {p.name: sha256_file(p) for p in files if (p.name in VOLATILE) == volatile}
