"""Errors a user can cause, each with the exit code that every command documents.

An error states the problem, its location (file:line or symbol) and the next command. Any other
exception is a defect of the program and keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_PREFLIGHT = 3
EXIT_NOT_COMPARABLE = 4
# STRICT=1: a comparison has no word.
EXIT_INCONCLUSIVE = 5
# A run does not agree with its own records.
EXIT_INVALID = 6
EXIT_TIME_LIMIT = 124
EXIT_INTERRUPTED = 130


# Characters that move the cursor of a terminal, change the direction of text, or end a line for some
# programs.
CONTROL_CHARACTER = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A longer word is a damaged value.
_MAX_WORD = 300


def escaped(text: str) -> str:
    """Return ``text`` with control characters escaped, except newlines and tabs."""
    return CONTROL_CHARACTER.sub(
        lambda match: match[0] if match[0] in "\n\t" else repr(match[0])[1:-1], text
    )


def visible(text: str) -> str:
    """Return ``text`` in one line, without characters that move or reorder what a reader sees."""
    return escaped(re.sub(r"\r?\n|\t", " ", text))


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, except newlines, and long words cut."""
    return re.sub(
        rf"\S{{{_MAX_WORD},}}", lambda match: f"{match[0][:_MAX_WORD // 2]}…", escaped(text)
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; nearest: A, B`` for an unknown name, in any case of its letters; "" if none is near."""
    spelled = {known.lower(): known for known in names}
    near = [spelled[low] for low in difflib.get_close_matches(name.lower(), spelled)]
    return f"; nearest: {', '.join(near)}" if near else ""


_CODE = re.compile(r"[a-z]+(?:-[a-z]+)*\.[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True)
class Problem:
    """One user-facing problem.

    ``what`` states the problem (``SYMBOL: problem (expected X, got Y)``), ``where`` its location
    (``file:line``, a run or a step), ``next`` the command that helps. ``code`` identifies the kind
    of problem (``area.kebab-name``, such as ``config.out-of-range``): it never changes when the
    wording does, tests and JSON readers rely on it.
    """

    what: str
    where: str = ""
    next: str = ""
    code: str = field(kw_only=True)

    def __post_init__(self) -> None:
        assert _CODE.fullmatch(self.code), self.code

    @property
    def located(self) -> str:
        """Return the problem with its location in one line, without its code and the command."""
        return visible(printable(f"{self.where}: {self.what}" if self.where else self.what))

    def __str__(self) -> str:
        text = f"{self.located} [{self.code}]"
        return f"{text}\n        {self.next}" if self.next else text


class KablateError(Exception):
    """A user's error: one or several problems, listed together, and an exit code."""

    exit_code = EXIT_FAILED

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    @property
    def codes(self) -> list[str]:
        """Return the code of each problem, in order."""
        return [problem.code for problem in self.problems]


class ConfigError(KablateError):
    """Usage or configuration is wrong; nothing was started."""

    exit_code = EXIT_CONFIG


class PreflightError(KablateError):
    """The machine cannot run the request; nothing was started."""

    exit_code = EXIT_PREFLIGHT


def environment_error(error: ImportError | MemoryError) -> PreflightError:
    """Return the error of a package that cannot be loaded, or of a lack of memory."""
    if isinstance(error, MemoryError):
        what = "out of memory" + f": {error}" * bool(str(error))
        return PreflightError(Problem(what, next="type: make JOBS=1", code="machine.no-memory"))
    package = (error.name or "").partition(".")[0]
    problem = Problem(
        f"{package or 'a package'} cannot be imported: {error}",
        next="type: make setup, or repair the active environment; V=1 shows the traceback",
        code="env.broken-package",
    )
    return PreflightError(problem)


class DataError(PreflightError):
    """A data set is missing, damaged or made by another tokenizer."""


class RunError(KablateError):
    """A run failed after it had started."""
