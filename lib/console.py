"""Terminal output: one line per event on stderr, with a fixed-width tag for grep."""

import argparse
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lib.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREFLIGHT,
    ConfigError,
    KablateError,
    Problem,
    printable,
)

TAG_WIDTH = 7
_COLOURS = {"FAIL": "31", "ERROR": "31", "REFUSE": "31", "WARN": "33", "DONE": "32"}


def use_colour() -> bool:
    """Return whether to colour stderr: a terminal, no ``NO_COLOR``, ``TERM=dumb`` or ``CI``."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
    return sys.stderr.isatty() and not plain and os.environ.get("TERM") != "dumb"


def is_ascii_only() -> bool:
    """Return whether the locale is limited to ASCII."""
    return "utf" not in (sys.stderr.encoding or "").lower()


def log(tag: str, text: str) -> None:
    """Write one event line ``TAG text`` to stderr in a single write."""
    head = f"{tag:<{TAG_WIDTH}}"
    if use_colour() and tag in _COLOURS:
        head = f"\x1b[{_COLOURS[tag]}m{head}\x1b[0m"
    line = f"{head} {printable(text)}\n"
    if is_ascii_only():
        line = line.encode("ascii", "replace").decode("ascii")
    sys.stderr.write(line)
    sys.stderr.flush()


def is_verbose() -> bool:
    """Return whether full commands and tracebacks are enabled (``V=1`` or ``V=2``)."""
    return os.environ.get("V", "0") not in ("", "0")


# Entry point of every script: exit codes, and user errors without a traceback.


class CommandLine(argparse.ArgumentParser):
    """Parser of a command line, whose misuse is an error like any other."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        advice = f"type: {sys.argv[0]} --help"
        raise ConfigError(Problem(message, next=advice, code="usage.invalid-argument"))


def run_main(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with its return value; report a user's error as ERROR lines.

    Every problem of a ``KablateError`` is one line on stderr. The last line names the exit code,
    because make turns every failure into 2. ``V=1`` adds the traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        # A character that the locale lacks, such as Δ, is printed as ?.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Keep an ignored SIGINT ignored. During the imports, Ctrl-C killed the script at once.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except KablateError as error:
        if is_verbose():
            traceback.print_exc()
        for problem in error.problems:
            log("ERROR", str(problem))
        code = error.exit_code
    except BrokenPipeError:
        # The reader of the output (head, less) exited: not an error.
        sys.stderr.close()
        code = 0
    except OSError as error:
        # A full disk, a read-only folder or a missing permission is not a defect of the program.
        if is_verbose():
            traceback.print_exc()
        log("ERROR", f"{error.filename or 'input/output'}: {error.strerror or error}")
        code = EXIT_PREFLIGHT
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        log("EXIT", f"code {code}")
    # The interpreter traverses every object at its exit: with torch loaded, for half a second.
    gc.freeze()
    sys.exit(code)


def confirm(question: str, yes: bool) -> None:
    """Prompt on the terminal, unless ``yes``.

    Raises ConfigError without a terminal, or if the answer is not yes.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        advice = "no terminal to confirm on: add YES=1"
        raise ConfigError(Problem(question, next=advice, code="usage.no-terminal"))
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(Problem("cancelled, nothing was changed", code="usage.cancelled"))
