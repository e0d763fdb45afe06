"""What is asked of a configuration, layer on layer, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.binding import Value
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Assignment:
    """One symbol set to one value.

    ``name`` is without ``CONFIG_``; ``value`` is plain text: y or n, a number, or a string's own
    characters without quotes and escapes; ``where`` is what an error points at: a file and line,
    ``SET``, or a step.
    """

    name: str
    value: str
    where: str
    # Whether a file wrote it in quotes; None where the source knows none (SET, steps).
    quoted: bool | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Origin(Assignment):
    """The assignment that a value came from, and the label of its layer."""

    label: str = ""


@dataclass(frozen=True)
class Layer:
    """Assignments from one source.

    ``label`` is one of defconfig, fragment, config (a full ``.config``), command line, step,
    menuconfig. ``problems`` are the lines that could not be read; resolving raises them.
    """

    label: str
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, label: str, where: str, settings: Mapping[str, Value]) -> "Layer":
        """A layer from Python values, such as a step's delta."""
        return cls(label, tuple(Assignment(k, as_text(v), where) for k, v in settings.items()))


@dataclass(frozen=True)
class Resolution:
    """The configuration that layers add up to.

    ``values`` holds every symbol with its Python type, and every choice as the lower-cased name of
    its selected member ("" when the choice is not available). ``origins`` has the same keys; None
    is the default. ``hidden`` tells which assignments a later layer has made meaningless.
    """

    values: Mapping[str, Value]
    origins: Mapping[str, Origin | None]
    layers: Sequence[Layer] = ()
    hidden: Sequence[Problem] = ()


def as_text(value: Value) -> str:
    """A value as an assignment spells it: y or n, a number, a string."""
    if isinstance(value, bool):
        return "y" if value else "n"
    return str(value)


def locate(error: ConfigError, resolution: Resolution) -> ConfigError:
    """The same error, with each ``NAME: …`` problem pointing at the line that set NAME."""
    return ConfigError(*(_located(p, resolution.origins) for p in error.problems))


def _located(problem: Problem, origins: Mapping[str, Origin | None]) -> Problem:
    origin = origins.get(problem.what.partition(":")[0])
    if problem.where or origin is None:
        return problem
    return Problem(problem.what, origin.where, problem.next)
