"""A second process for what one process cannot show: a fresh start, and training in two."""

import contextlib
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lib.errors import KablateError, RunError
from lib.runner.worker import find_function

# A partner that has died or waits for a message that never comes.
_PATIENCE_SECONDS = 120.0
# How a pipe says that its other end is closed.
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


class Partner:
    """Forked when it is made, so that it runs the same code, patched or not."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        self._calls = 0
        theirs.close()

    def start(self, function: str, *arguments: Any) -> None:
        """Have ``module:function`` called over there."""
        self._calls += 1
        with contextlib.suppress(*_GONE):
            self._pipe.send((self._calls, function, arguments))

    def result(self) -> Any:
        """What the last call returned. RunError where it raised, or the process died."""
        number = 0
        try:
            # Of calls before it whose results were not taken, because something had failed here.
            while number < self._calls:
                if not self._pipe.poll(_PATIENCE_SECONDS):
                    raise RunError("the second process does not answer")
                number, kind, value = self._pipe.recv()
        except _GONE:
            raise RunError("the second process died") from None
        if kind == "error":
            raise RunError(value)
        return value

    def call(self, function: str, *arguments: Any) -> Any:
        """``start`` and ``result``."""
        self.start(function, *arguments)
        return self.result()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Outcome:
    """Keeps an error as words, so that it is one more thing to tell."""

    text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.text = describe(error)
        return True


def describe(error: Exception) -> str:
    """An error in one line: whose it is, what, and where it was raised.

    What a line of the check raises itself is a defect of the check, and says nothing of the step.
    """
    what = " ".join(str(error).split())
    if isinstance(error, KablateError):
        return what
    (last,) = traceback.extract_tb(error.__traceback__)[-1:]
    own = Path(last.filename).is_relative_to(Path(__file__).parent)
    whose = "the check itself fails" if own else "the checked code raises"
    return f"{whose}: {type(error).__name__}: {what} ({last.filename}:{last.lineno})"


def _serve(pipe: Connection, theirs: Connection) -> None:
    """Answer calls until nobody asks, or wants to know, any more."""
    theirs.close()
    with contextlib.suppress(*_GONE):
        while True:
            number, function, arguments = pipe.recv()
            value = None
            with Outcome() as outcome:
                value = find_function(function)(*arguments)
            pipe.send((number, "error", outcome.text) if outcome.text else (number, "value", value))
