"""Commands of the user that are started when a run or a study has ended."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from lib.console import log
from lib.errors import ConfigError, Problem
from lib.runs.run import Run
from lib.runs.run_dir import RunStatus

SCHEMA_VERSION = 1
_LIMIT_SECONDS = 60.0


def command_words(text: str, symbol: str) -> list[str]:
    """Return program and arguments of a command; [] if it is empty.

    Raises ConfigError located at ``symbol`` if the quotes are not closed, or there is no program of
    this name.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        what = f"malformed command {text!r} ({error})"
        raise ConfigError(Problem(what, symbol, code="config.malformed")) from None
    if words and shutil.which(words[0]) is None:
        what = f"no such program (got {words[0]!r})"
        advice = f"type: make why SYM={symbol}"
        raise ConfigError(Problem(what, symbol, advice, code="config.no-such-program"))
    return words


def start_command(words: Sequence[str], run: Run[Any], status: RunStatus) -> None:
    """Start a command with the run as JSON on its standard input, and wait for it."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "run": run.label,
        "directory": str(run.path.absolute()),
        "state": status.state.word,
        "message": status.message,
        "iteration": status.iteration,
        "iterations": status.iterations,
    }
    feed_command(words, json.dumps(record, sort_keys=True), run.label)


def feed_command(words: Sequence[str], text: str, label: str) -> None:
    """Start a command with ``text`` on its standard input, and wait for it.

    The text reaches no shell and no argument. A failure is logged with ``label``, and nothing else.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            encoding="utf-8",
            stdout=subprocess.DEVNULL,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        # Not the text of the error, which contains the arguments.
        problem = f"no end after {_LIMIT_SECONDS:g} s"
    except OSError as error:
        problem = str(error)
    if problem:
        log("WARN", f"{label}   {words[0]}: {problem}")
