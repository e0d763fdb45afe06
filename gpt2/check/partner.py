"""A second process, for fresh starts and training on two ranks."""

import contextlib
import multiprocessing
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lib.errors import KablateError, Problem, RunError
from lib.runner.worker import find_function

# Limit for a result of the partner, which may be blocked in a collective operation.
_TIMEOUT_SECONDS = 120.0
# Errors of a pipe whose other end is closed.
_PIPE_CLOSED = (EOFError, BrokenPipeError, ConnectionResetError)


class Partner:
    """A forked process, which runs the same code as this process, patched or not."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, self._pipe), daemon=True)
        self._process.start()
        self._calls = 0
        child_pipe.close()

    def start(self, function: str, *arguments: Any) -> None:
        """Start a call of ``module:function`` in the partner."""
        self._calls += 1
        with contextlib.suppress(*_PIPE_CLOSED):
            self._pipe.send((self._calls, function, arguments))

    def result(self) -> Any:
        """Return the result of the last call.

        Raises RunError if the call raised, timed out, or the process died.
        """
        number = 0
        try:
            # Skip results of earlier calls, left unread because of an error in this process.
            while number < self._calls:
                if not self._pipe.poll(_TIMEOUT_SECONDS):
                    what = f"no result from the second process within {_TIMEOUT_SECONDS:.0f} s"
                    raise RunError(Problem(what, code="check.peer-timeout"))
                number, error_code, value = self._pipe.recv()
        except _PIPE_CLOSED:
            raise RunError(Problem("the second process died", code="check.peer-died")) from None
        if error_code:
            raise RunError(Problem(value, code=error_code))
        return value

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``module:function`` in the partner and return its result."""
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
    """Context that catches an exception and stores its code and message for a finding."""

    text = ""
    # As in Finding.property.
    code = ""

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
        self.code, self.text = describe(error)
        return True


def describe(error: Exception) -> tuple[str, str]:
    """Return the code and a one-line description of an error.

    An exception raised in a file of this package is a defect of the check, and not a property of
    the step.
    """
    if isinstance(error, KablateError):
        text = " ".join(str(replace(problem, code="")) for problem in error.problems)
        return error.codes[0] or "check.error", " ".join(text.split())
    what = " ".join(str(error).split())
    (last,) = traceback.extract_tb(error.__traceback__)[-1:]
    in_check = Path(last.filename).is_relative_to(Path(__file__).parent)
    code = "check.defect" if in_check else "check.exception"
    source = "defect of the check" if in_check else "exception in the checked code"
    return code, f"{source}: {type(error).__name__}: {what} ({last.filename}:{last.lineno})"


def _serve(pipe: Connection, parent_pipe: Connection) -> None:
    """Serve calls until the parent closes the pipe."""
    parent_pipe.close()
    with contextlib.suppress(*_PIPE_CLOSED):
        while True:
            number, function, arguments = pipe.recv()
            value = None
            with Outcome() as outcome:
                value = find_function(function)(*arguments)
            pipe.send((number, outcome.code, outcome.text if outcome.code else value))
