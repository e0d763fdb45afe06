"""Layers of assignments and the configuration that they resolve to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lib.binding import Value
from lib.errors import ConfigError, Problem


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
class Origin(Assignment):
    """Assignment that a value comes from, with the label of its layer."""

    label: str = ""


@dataclass(frozen=True)
class Layer:
    """Assignments from one source.

    ``label`` is one of defconfig, fragment, config (a full ``.config``), command line, step,
    menuconfig. ``problems`` are the unreadable lines; resolving the layer raises them.
    """

    label: str
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, label: str, where: str, settings: Mapping[str, Value]) -> "Layer":
        """Return a layer of Python values, such as a step's delta."""
        return cls(label, tuple(Assignment(k, as_text(v), where) for k, v in settings.items()))


@dataclass(frozen=True)
class Resolution:
    """Configuration that layers resolve to.

    ``values`` maps every symbol to its value (with its Python type) and every choice to the
    lower-case name of the selected member ("" if the choice is unavailable). ``origins`` has the
    same keys; None marks a default. ``hidden`` lists the assignments that a later layer made
    inapplicable.
    """

    values: Mapping[str, Value]
    origins: Mapping[str, Origin | None]
    layers: Sequence[Layer] = ()
    hidden: Sequence[Problem] = ()


def as_text(value: Value) -> str:
    """Return a value as written in an assignment: y or n, a number, a string."""
    if isinstance(value, bool):
        return "y" if value else "n"
    return str(value)


def locate(error: ConfigError, resolution: Resolution) -> ConfigError:
    """Return the error with each ``NAME: …`` problem located at the line that set NAME."""
    return ConfigError(*(_located(p, resolution.origins) for p in error.problems))


def _located(problem: Problem, origins: Mapping[str, Origin | None]) -> Problem:
    origin = origins.get(problem.what.partition(":")[0])
    if problem.where or origin is None:
        return problem
    return replace(problem, where=origin.where)
