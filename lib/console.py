"""Terminal output: results on stdout; on stderr one line per event, with a fixed-width tag for grep."""

import argparse
import errno
import gc
import io
import os
import re
import secrets
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from textwrap import TextWrapper
from typing import Any, NoReturn, TextIO

from lib.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    KablateError,
    PreflightError,
    Problem,
    environment_error,
    escaped,
    nearest,
    printable,
)
from lib.files import pretty_json
from lib.gone import gone

TAG_WIDTH = 7
_COLOURS = {"FAIL": "31", "ERROR": "31", "REFUSE": "31", "WARN": "33", "DONE": "32"}

# Introduces the colour code of ``painted``: random, so that no text of a file can contain it.
_PAINT = f"\x1b{secrets.token_hex(8)}:"
_PAINTED = re.compile(rf"{_PAINT}([\d;]+)m")

# The blank between a number and its unit.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:ms|s|h|it|tok/s|[kMG]i?B)(?!\w)))")
_NO_BREAK = "\N{NO-BREAK SPACE}"


def use_colour(stream: TextIO | None = None) -> bool:
    """Return whether to colour a stream, by default stderr.

    Coloured is a terminal without ``NO_COLOR``, ``TERM=dumb`` and ``CI``.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
    return (stream or sys.stderr).isatty() and not plain and os.environ.get("TERM") != "dumb"


def terminal_columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that ``stream`` writes to; None if it is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def folded(text: str, columns: int | None, indent: str = "") -> str:
    """Return ``text`` with lines of at most ``columns`` characters, broken between words.

    ``indent`` begins the continuation of a line. A longer word, such as a path, stays whole, and so
    does a number with its unit.
    """
    if columns is None:
        return text
    wrapper = TextWrapper(
        columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    lines = _UNIT.sub(_NO_BREAK, text).split("\n")
    shown = ("\n".join(wrapper.wrap(x)) if len(x) > columns else x for x in lines)
    return "\n".join(shown).replace(_NO_BREAK, " ")


def is_ascii_only() -> bool:
    """Return whether the locale is limited to ASCII."""
    return "utf" not in (sys.stderr.encoding or "").lower()


def painted(text: str, *codes: str) -> str:
    """Return ``text`` in the SGR colours and weights ``codes``, which ``show`` displays."""
    return f"{_PAINT}{';'.join(codes)}m{text}{_PAINT}0m" if text and codes else text


def shown(text: str, *, colour: bool) -> str:
    """Return ``text`` as a terminal receives it: with newlines, tabs and the colours of ``painted``.

    Other control characters, such as those in the files of a run, are escaped.
    """
    pieces = _PAINTED.split(text)
    pieces[::2] = map(escaped, pieces[::2])
    pieces[1::2] = [f"\x1b[{codes}m" if colour else "" for codes in pieces[1::2]]
    return "".join(pieces)


def show(text: str) -> None:
    """Write a result to stdout. Every command writes its results by this function."""
    sys.stdout.write(shown(text, colour=use_colour(sys.stdout)))
    sys.stdout.flush()


def log(tag: str, text: str) -> None:
    """Write one event line ``TAG text`` to stderr in a single write."""
    head, indent = f"{tag:<{TAG_WIDTH}}", " " * (TAG_WIDTH + 1)
    # No line of a text looks like another event.
    lines = [x if x.startswith(indent) else f"{indent}{x}" for x in printable(text).split("\n")]
    line = head + "\n".join(lines).removeprefix(" " * TAG_WIDTH)
    # A file has one line for each event, for grep.
    line = folded(line, terminal_columns(sys.stderr), indent) + "\n"
    if use_colour() and tag in _COLOURS:
        line = f"\x1b[{_COLOURS[tag]}m{head}\x1b[0m{line.removeprefix(head)}"
    if is_ascii_only():
        line = line.encode("ascii", "replace").decode("ascii")
    sys.stderr.write(line)
    sys.stderr.flush()


def is_verbose() -> bool:
    """Return whether full commands and tracebacks are enabled (``V=1`` or ``V=2``)."""
    return os.environ.get("V") in ("1", "2")


# Entry point of every script: exit codes, and user errors without a traceback.


class CommandLine(argparse.ArgumentParser):
    """Parser of a command line, whose misuse is an error like any other.

    An abbreviated option is one: another option may have the same beginning later.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(**named, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        advice = f"type: {self.prog} --help"
        typed = re.findall(r"--[\w-]+", message)
        problems = [
            Problem(f"{word}: {answer}", next=advice, code="usage.gone")
            for word in typed
            if (answer := gone("option", word))
        ]
        known = self._option_string_actions
        near = nearest(typed[0], known) if typed and typed[0] not in known else ""
        invalid = Problem(f"{message}{near}", next=advice, code="usage.invalid-argument")
        raise ConfigError(*problems or [invalid])


def run_main(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with its return value; report a user's error as ERROR lines.

    Every problem of a ``KablateError`` is one line on stderr. The last line names the exit code,
    because make turns every failure into 2. ``V=1`` adds the traceback, and the warnings of libraries.
    With ``JSON=1``, the problems are a document on stdout too.
    """
    for stream in (sys.stdout, sys.stderr):
        # A character that the locale lacks, such as Δ, is printed as ?.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Keep an ignored SIGINT ignored. During the imports, Ctrl-C killed the script at once.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Libraries warn their developers of what a user cannot change; the log of a run has the warnings.
    if not (is_verbose() or sys.warnoptions):
        warnings.simplefilter("ignore")
    # Commands keep most objects that they create. With Python's threshold of 700 new objects, an
    # eighth of the time of a large plan is spent on collections that find nothing.
    gc.set_threshold(10_000)
    try:
        code = main()
    except KablateError as error:
        code = _report(error)
    except (ImportError, MemoryError) as error:
        code = _report(environment_error(error))
    except BrokenPipeError:
        # The reader of the output (head, less) exited: not an error.
        sys.stderr.close()
        code = 0
    except OSError as error:
        # A full disk, a read-only folder or a missing permission is not a defect of the program.
        what, where = error.strerror or str(error), str(error.filename or "input/output")
        refused = error.errno in (errno.EACCES, errno.EROFS)
        advice = "type: make O=FOLDER, to write into another folder" if refused else ""
        code = _report(PreflightError(Problem(what, where, advice, code="file.input-output")))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        log("EXIT", f"code {code}")
    # The interpreter traverses every object at its exit: with torch loaded, for half a second. The
    # binding of triton reports what it leaves on thirty lines of stderr.
    if "triton._C" not in sys.modules:
        gc.freeze()
    sys.exit(code)


def _report(error: KablateError) -> int:
    """Write the problems of an error; return its exit code."""
    if is_verbose():
        sys.stderr.write(escaped(traceback.format_exc()))
    for problem in error.problems:
        log("ERROR", str(problem))
    if "--json" in sys.argv or os.environ.get("JSON", "") not in ("", "0", "n"):
        problems = [vars(problem) for problem in error.problems]
        document = {"schema_version": 1, "exit_code": error.exit_code, "problems": problems}
        show(pretty_json(document))
    return error.exit_code


def confirm(question: str, yes: bool | None) -> None:
    """Prompt on the terminal, unless ``yes``; None is a refusal without a question.

    Raises ConfigError without a terminal, or if the answer is not yes.
    """
    if yes:
        return
    if yes is None or not sys.stdin.isatty():
        advice = "no terminal to confirm on: add YES=1"
        raise ConfigError(Problem(question, next=advice, code="usage.no-terminal"))
    sys.stderr.write(f"{escaped(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(Problem("cancelled, nothing was changed", code="usage.cancelled"))
