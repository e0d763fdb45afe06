"""The one way a script ends: its exit code, and errors without a wall of traceback."""

import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lib.console import say, verbose
from lib.errors import EXIT_INTERRUPTED, EXIT_PREFLIGHT, ConfigError, KablateError, Problem


def run(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with what it returns; a user's error becomes ERROR lines.

    Every problem of a ``KablateError`` is one line on stderr, and the last line names the exit
    code, because make turns every failure into 2. ``V=1`` adds the traceback.
    """
    # What is ignored stays so; while scripts were imported, Ctrl-C ended them at once.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except KablateError as error:
        if verbose():
            traceback.print_exc()
        for problem in error.problems:
            say("ERROR", str(problem))
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output (head, less) went away: not an error of ours.
        sys.stderr.close()
        code = 0
    except OSError as error:
        # A full disk, a read-only folder, a missing permission: the machine's answer, not a defect.
        if verbose():
            traceback.print_exc()
        say("ERROR", f"{error.filename or 'input/output'}: {error.strerror or error}")
        code = EXIT_PREFLIGHT
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        say("EXIT", f"code {code}")
    sys.exit(code)


def confirm(question: str, yes: bool) -> None:
    """Ask on the terminal, unless ``yes``. ConfigError without a terminal, or without a yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(Problem(question, next="there is no terminal to answer on: add YES=1"))
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was done")
