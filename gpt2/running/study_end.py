"""The command of the user that is started once, when a study ends, fails or stops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.console import log
from lib.errors import KablateError
from lib.report.render import json_document
from lib.report.study import SCHEMA_VERSION, VERDICTS_FILE
from lib.runner.hooks import feed_command
from lib.runner.queue import file_version
from lib.runs.run_dir import RunDir


@contextmanager
def command_at_end(
    words: Sequence[str], folder: Path, document: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """Start a command with the study's document after the body, also if the body raises an error.

    The document is the one that the body has written, or else ``document``. Nothing is started without
    ``words``, or if the state of no run in ``folder`` has changed. A failure is a warning.
    """
    if not words:
        yield
        return
    file = folder / VERDICTS_FILE
    states, written = _states(folder), file_version(file)
    try:
        yield
    finally:
        if _states(folder) != states:
            try:
                if file_version(file) != written:
                    text = file.read_text(encoding="utf-8")
                else:
                    text = json_document(SCHEMA_VERSION, document())
            # Such as a damaged record, which the study's own report names too.
            except (KablateError, OSError) as error:
                log("WARN", f"{folder.name}   {words[0]} not started: {error}")
            else:
                feed_command(words, text, folder.name)


def _states(folder: Path) -> dict[str, Any]:
    """Return the version of the status of each run in a folder."""
    files = (RunDir(run).status for run in folder.iterdir()) if folder.is_dir() else ()
    return {str(file): version for file in files if (version := file_version(file))}
