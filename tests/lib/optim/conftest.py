"""Fixtures: the options of every case, bound from a resolved configuration."""

from collections.abc import Callable
from typing import Any

import pytest

from lib.binding import Value
from lib.kconfig import Layer, Tree
from lib.optim import OPTIMIZERS
from tests.lib.optim.cases import SETTINGS


@pytest.fixture(scope="session")
def tree() -> Tree:
    """Return the Kconfig tree."""
    return Tree()


@pytest.fixture(scope="session")
def options_of(tree: Tree) -> Callable[[dict[str, Value]], Any]:
    """Return a function from symbols to an optimizer's options."""

    def bound(settings: dict[str, Value]) -> Any:
        return OPTIMIZERS.bind(tree.resolve([Layer.of("test", "test", settings)]).values)[0]

    return bound


@pytest.fixture(params=list(SETTINGS))
def options(request: pytest.FixtureRequest, options_of: Callable) -> Any:
    """Return the options of each case in turn."""
    return options_of(SETTINGS[request.param])
