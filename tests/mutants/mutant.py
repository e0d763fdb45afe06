"""A fault that is planted in the product's code, and what ``make check`` has to say of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from lib.binding import Value

Plant = Callable[[pytest.MonkeyPatch], None]
RATIO = "gpt2-ratio-ablation"
MECHANISMS = "gpt2-mechanisms"
# What an error of the checked code is reported as.
RAISES = "the checked code raises"


@dataclass(frozen=True)
class Mutant:
    """One fault. ``caught_by``: each check that has to fail, and a pattern of what it says."""

    name: str
    breaks: str
    step: str
    caught_by: Mapping[str, str]
    plant: Plant
    defconfig: str = RATIO
    # Symbols on top of the defconfig.
    settings: Mapping[str, Value] = field(default_factory=dict)
    # Steps that it is compared with, besides its parent.
    beside: tuple[str, ...] = ()
    # Part of every run of the tests, and not of the long one alone.
    quick: bool = False


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Puts ``make(what is there)`` in the place of an attribute of ``owner``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def then(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Passes what a function returns through ``change(result, *arguments)``."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: change(right(*given, **named), *given)

    return replaced(owner, name, make)


def nothing(owner: Any, *names: str) -> Plant:
    """Methods that do nothing."""
    return together(
        *(replaced(owner, name, lambda _: lambda *given, **named: None) for name in names)
    )


def together(*plants: Plant) -> Plant:
    """One fault in several places."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for one in plants:
            one(patch)

    return plant


def after_init(owner: Any, change: Callable[..., Any]) -> Plant:
    """Lets ``change(self)`` follow the constructor."""

    def make(right: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *given: Any, **named: Any) -> None:
            right(self, *given, **named)
            change(self)

        return init

    return replaced(owner, "__init__", make)
