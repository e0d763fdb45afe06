"""A fault planted in the product's code, and the findings of ``make check`` that must catch it."""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpt2.study.study_file import STUDIES
from lib.config.field import SymbolValue

Plant = Callable[[pytest.MonkeyPatch], None]
# A property of a finding, with regular expressions for names and numbers in the finding.
Expected = str | tuple[str, ...]
RATIO = "gpt2-ratio-ablation"
MECHANISMS = "gpt2-mechanisms"


@dataclass(frozen=True)
class Mutant:
    """One fault, and the checks that must fail.

    ``caught_by`` maps each check that must fail to one of its findings.
    """

    name: str
    step: str
    caught_by: Mapping[str, Expected]
    plant: Plant
    defconfig: str = RATIO
    # Symbols on top of the defconfig.
    settings: Mapping[str, SymbolValue] = field(default_factory=dict)
    # Steps to compare with, besides the parent.
    beside: tuple[str, ...] = ()
    # Part of every test run, not only of the long one.
    quick: bool = False


def planted_faults() -> list[Mutant]:
    """Return the faults of all areas: of every other module of this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    areas = [
        name
        for name in names
        if name not in ("mutant", "interpreted") and not name.startswith(("test_", "_"))
    ]
    modules = [importlib.import_module(f"tests.mutants.{name}") for name in areas]
    return [mutant for module in modules for mutant in module.MUTANTS]


# The logits differ from the reference formulas.
LOGITS: Expected = ("reference-formulas", "^logits")


def same_as(slug: str) -> Expected:
    """Return the finding that a step computes and learns the same function as ``slug``."""
    return "distinct-function", rf"than {slug};"


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Return a plant that replaces an attribute of ``owner`` by ``make(attribute)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def entry(table: dict[Any, Any], key: Any, value: Any) -> Plant:
    """Return a plant that replaces an entry of a table."""
    return lambda patch: patch.setitem(table, key, value)


def then(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return a plant that passes results of a function through ``change(result, *arguments)``."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: change(right(*given, **named), *given)

    return replaced(owner, name, make)


def nothing(owner: Any, *names: str) -> Plant:
    """Return a plant that disables methods."""
    return together(
        *(replaced(owner, name, lambda _: lambda *given, **named: None) for name in names)
    )


def together(*plants: Plant) -> Plant:
    """Return a plant of several plants."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for one in plants:
            one(patch)

    return plant


def after_init(owner: Any, change: Callable[..., Any]) -> Plant:
    """Return a plant that calls ``change(self)`` after the constructor."""

    def make(right: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *given: Any, **named: Any) -> None:
            right(self, *given, **named)
            change(self)

        return init

    return replaced(owner, "__init__", make)


def step_sets(study: str, slug: str, changes: Mapping[str, SymbolValue], **parts: Any) -> Plant:
    """Return a plant that replaces the changes of a step, and other parts by name."""
    return _step_with(study, slug, set=changes, **parts)


def step_also_sets(study: str, slug: str, changes: Mapping[str, SymbolValue]) -> Plant:
    """Return a plant that adds to the changes of a step."""
    (step,) = STUDIES[study].select(slug)
    return step_sets(study, slug, {**step.set, **changes})


def step_inherits(study: str, slug: str, parent: str) -> Plant:
    """Return a plant that replaces the parent of a step."""
    return _step_with(study, slug, parent=parent)


def _step_with(study: str, slug: str, **parts: Any) -> Plant:
    right = STUDIES[study]
    steps = tuple(replace(s, **parts) if s.slug == slug else s for s in right.steps)
    return lambda patch: patch.setitem(STUDIES, study, replace(right, steps=steps))


def edited(owner: Any, name: str, old: str, new: str) -> Plant:
    """Return a plant that replaces ``old`` by ``new`` in the source of a function.

    A function that calls ``super()`` cannot be edited.
    """

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        function = inspect.unwrap(right)
        source = textwrap.dedent(inspect.getsource(function))
        assert old in source, f"{name} does not contain {old!r}"
        scope: dict[str, Any] = {}
        code = compile(source.replace(old, new), inspect.getfile(function), "exec")
        exec(code, function.__globals__, scope)
        planted: Callable[..., Any] = scope[function.__name__]
        return planted

    return replaced(owner, name, make)
