"""Layers of assignments and the configuration that they resolve to."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lib.config.field import SymbolValue
from lib.errors import CONTROL_CHARACTER, ConfigError, Problem
from lib.files import regular_file, write_json
from lib.json_files import RecordError, read_json_object


@dataclass(frozen=True)
class Assignment:
    """One symbol set to one value.

    ``name`` has no ``CONFIG_`` prefix. ``value`` is plain text: y or n, a number, or a string
    without quotes and escapes. ``where`` is the source shown in errors: a file and line, ``SET``,
    or a step.
    """

    name: str
    value: str
    where: str
    # Whether the value is quoted in a file; None for sources without quotes (SET, steps).
    quoted: bool | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ValueOrigin(Assignment):
    """Assignment that a value comes from, with the label of its layer."""

    label: str = ""


@dataclass(frozen=True)
class ConfigLayer:
    """Assignments from one source.

    ``label`` is one of defconfig, fragment, config (a full ``.config``), constants (a generated
    ``config.py``, in which a choice is set to its member's name), command line, step.
    ``problems`` are the unreadable lines; resolving the layer raises them. ``defaults`` are the
    symbols and choices of a full layer that were recorded as defaults; they follow the layers with
    ``moves_defaults``.
    """

    label: str
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()
    defaults: frozenset[str] = frozenset()
    moves_defaults: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether the layer lists every value, those included that no user can set."""
        return self.label in ("config", "constants")

    @classmethod
    def of(
        cls,
        label: str,
        where: str,
        settings: Mapping[str, SymbolValue],
        *,
        moves_defaults: bool = False,
    ) -> "ConfigLayer":
        """Return a layer of Python values, such as a step's delta."""
        texts = {name: to_kconfig_text(value) for name, value in settings.items()}
        assignments = tuple(Assignment(name, text, where) for name, text in texts.items())
        return cls(label, assignments, moves_defaults=moves_defaults)


@dataclass(frozen=True)
class ResolvedConfig:
    """Configuration that layers resolve to.

    ``values`` maps every symbol to its value (with its Python type) and every choice to the
    lower-case name of the selected member ("" if the choice is unavailable). ``origins`` has the
    same keys; None marks a default. ``hidden`` lists the assignments that a later layer made
    inapplicable.
    """

    values: Mapping[str, SymbolValue]
    origins: Mapping[str, ValueOrigin | None]
    layers: Sequence[ConfigLayer] = ()
    hidden: Sequence[Problem] = ()


def to_kconfig_text(value: SymbolValue) -> str:
    """Return a value as written in an assignment: y or n, a number, a string."""
    if isinstance(value, bool):
        return "y" if value else "n"
    return str(value)


def with_locations(error: ConfigError, resolution: ResolvedConfig) -> ConfigError:
    """Return the error with each ``NAME: …`` problem located at the line that set NAME."""
    problems = []
    for problem in error.problems:
        # The symbol that breaks the rule, or else the first symbol of the rule that was set.
        names = [problem.what.partition(":")[0], *_SYMBOL.findall(problem.what)]
        origin = next(filter(None, map(resolution.origins.get, names)), None)
        where = problem.where or (origin.where if origin else "")
        problems.append(replace(problem, where=where))
    return ConfigError(*problems)


# Strict parser of ``CONFIG_NAME=value`` files and ``SET="A=1 B=y"``.
#
# Files are data: nothing in a value is expanded. Inside quotes ``\"`` and ``\\`` are the only
# escapes; kconfiglib would silently drop any other backslash.


PREFIX = "CONFIG_"
_SYMBOL = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_LINE = re.compile(
    r'CONFIG_(?P<name>[A-Za-z0-9_]+)=(?:"(?P<text>(?:[^"\\]|\\["\\])*)"|(?P<bare>[^\s"#]+))'
    r"|# CONFIG_(?P<unset>[A-Za-z0-9_]+) is not set"
)
_COMMENT = re.compile(r"\s*(#(?!\s*CONFIG_\w+\s+is\s+not\s+set\b).*)?")
_EXPECTED = (
    'CONFIG_NAME=y without spaces, CONFIG_NAME="text" with \\" and \\\\ for " and \\, '
    "exactly '# CONFIG_NAME is not set', or a comment on a line of its own"
)


def read_file(path: Path, label: str, shown: str = "") -> ConfigLayer:
    """Read the assignments of a ``.config``, defconfig or fragment; errors call the file ``shown``.

    Malformed lines become the layer's ``problems``, to be listed together with all others. Raises
    ConfigError if the file is unreadable or not UTF-8.
    """
    shown = shown or str(path)
    try:
        with open(path, "rb", opener=regular_file) as stream:
            data = stream.read()
    except OSError as error:
        problem = Problem(f"unreadable: {error.strerror}", shown, code="config.unreadable")
        raise ConfigError(problem) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem("not UTF-8 text", f"{shown}:{line}", code="config.not-utf8")
        raise ConfigError(problem) from None
    return parse_text(text, label, shown)


def parse_text(text: str, label: str, shown: str) -> ConfigLayer:
    """Parse the text of a configuration file; errors call the file ``shown``."""
    assignments, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        where, line = f"{shown}:{number}", line.removesuffix("\r").rstrip(" \t")
        if match := _LINE.fullmatch(line):
            name, quoted, bare, unset = match.groups()
            value = bare or "n" if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            assignments.append(Assignment(name or unset, value, where, quoted is not None))
        elif not _COMMENT.fullmatch(line):
            what = f"malformed line {line!r} (expected {_EXPECTED})"
            problems.append(Problem(what, where, code="config.malformed"))
        # Editors hide them, and end the line at some: an assignment could hide in a comment.
        elif hidden := CONTROL_CHARACTER.search(line.replace("\t", " ")):
            what = f"line break or control character {hidden[0]!r} in a comment"
            problems.append(Problem(what, where, code="config.invalid-character"))
    return ConfigLayer(label, tuple(assignments), tuple(problems))


def parse_command_line_settings(text_or_words: str | Sequence[str]) -> ConfigLayer:
    """Parse ``SET="A=1 B=y"``, given as one text (split like in a shell) or as a list of words."""
    words: Sequence[str]
    try:
        words = shlex.split(text_or_words) if isinstance(text_or_words, str) else text_or_words
    except ValueError:
        problem = Problem("unterminated quotes", "SET", code="config.unterminated-quotes")
        return ConfigLayer("command line", (), (problem,))
    assignments, problems = [], []
    for word in words:
        name, equals, value = word.partition("=")
        name = name.removeprefix(PREFIX)
        if equals and _NAME.fullmatch(name):
            assignments.append(Assignment(name, value, "SET"))
        else:
            what = f"malformed {word!r} (expected NAME=value without spaces around '=')"
            advice = 'type: SET="NAME=value NAME=value"'
            problems.append(Problem(what, "SET", advice, code="config.malformed"))
    return ConfigLayer(
        "command line", tuple(assignments), tuple(problems), moves_defaults=bool(assignments)
    )


# Origins of the values of a ``.config``, stored beside it in ``.config.origins`` (JSON).


SCHEMA_VERSION = 1


def origins_path(config: Path) -> Path:
    """Return the path of the origins of the configuration file ``config``."""
    return config.with_name(config.name + ".origins")


def write_origins(config: Path, resolution: ResolvedConfig, defaults: Mapping[str, str]) -> None:
    """Write the origin of every value; ``defaults`` maps names to locations of definitions."""
    records: dict[str, dict[str, str]] = {}
    for name, value in resolution.values.items():
        origin = resolution.origins[name]
        label, where = (origin.label, origin.where) if origin else ("default", defaults[name])
        records[name] = {"value": to_kconfig_text(value), "label": label, "where": where}
    write_json(origins_path(config), {"schema_version": SCHEMA_VERSION, "origins": records})


def read_origins(config: Path) -> dict[str, dict[str, str]] | None:
    """Return the recorded origins by name, None if there is no record.

    They are the ``value`` as text, the ``label`` of its layer ("default" for none), and the location
    of the assignment as ``where``. Raises ConfigError if the record is damaged.
    """
    path = origins_path(config)
    if not path.exists():
        return None
    try:
        document = read_json_object(path)
        keys = ("value", "label", "where")
        return {name: {k: record[k] for k in keys} for name, record in document["origins"].items()}
    except (RecordError, KeyError, TypeError, AttributeError):
        problem = Problem("damaged", str(path), f"rm {path}", code="config.damaged")
        raise ConfigError(problem) from None
