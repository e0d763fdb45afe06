"""Fixtures: the Kconfig tree and every case in turn."""

import functools
from collections.abc import Callable, Mapping

import pytest

from lib.binding import Value
from lib.kconfig import Layer, Tree
from tests.lib.pruning.cases import SETTINGS, Trial


@pytest.fixture(scope="session")
def tree() -> Tree:
    """Return the Kconfig tree."""
    return Tree()


@pytest.fixture(scope="session")
def trial(tree: Tree) -> Callable[..., Trial]:
    """Return a function that builds a case of SETTINGS with changed symbols, ready to train."""

    @functools.cache
    def resolved(settings: tuple[tuple[str, Value], ...]) -> Mapping[str, Value]:
        return tree.resolve([Layer.of("test", "test", dict(settings))]).values

    def build(name: str, **changes: Value) -> Trial:
        settings = SETTINGS[name] | {"PRUNING_FREQUENCY": 5} | changes
        return Trial(resolved(tuple(settings.items())))

    return build


@pytest.fixture(params=list(SETTINGS))
def case(request: pytest.FixtureRequest) -> str:
    """Return every case in turn."""
    return str(request.param)
