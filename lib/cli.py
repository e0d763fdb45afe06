"""Entry point of every script: exit codes, and user errors without a traceback."""

import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lib.console import say, verbose
from lib.errors import EXIT_INTERRUPTED, EXIT_PREFLIGHT, ConfigError, KablateError, Problem


def run(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with its return value; report a user's error as ERROR lines.

    Every problem of a ``KablateError`` is one line on stderr. The last line names the exit code,
    because make turns every failure into 2. ``V=1`` adds the traceback.
    """
    # Keep an ignored SIGINT ignored. During the imports, Ctrl-C killed the script at once.
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
        # The reader of the output (head, less) exited: not an error.
        sys.stderr.close()
        code = 0
    except OSError as error:
        # A full disk, a read-only folder or a missing permission is not a defect of the program.
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
