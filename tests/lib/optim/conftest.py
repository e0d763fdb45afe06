"""Fixtures: the options of every case, bound from a resolved configuration."""

from collections.abc import Callable
from typing import Any

import pytest

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.options import OPTIMIZERS
from tests.lib.optim.cases import SETTINGS


@pytest.fixture(scope="session")
def tree() -> KconfigTree:
    """Return the Kconfig tree."""
    return KconfigTree()


@pytest.fixture(scope="session")
def options_of(tree: KconfigTree) -> Callable[[dict[str, SymbolValue]], Any]:
    """Return a function from symbols to an optimizer's options."""

    def bound(settings: dict[str, SymbolValue]) -> Any:
        return OPTIMIZERS.bind(tree.resolve([ConfigLayer.of("test", "test", settings)]).values)[0]

    return bound


@pytest.fixture(params=list(SETTINGS))
def options(request: pytest.FixtureRequest, options_of: Callable) -> Any:
    """Return the options of each case in turn."""
    return options_of(SETTINGS[request.param])
