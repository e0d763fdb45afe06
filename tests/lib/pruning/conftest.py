"""Fixtures: the Kconfig tree and every case in turn."""

import functools
from collections.abc import Callable, Mapping

import pytest

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from tests.lib.pruning.cases import SETTINGS, Trial


@pytest.fixture(scope="session")
def tree() -> KconfigTree:
    """Return the Kconfig tree."""
    return KconfigTree()


@pytest.fixture(scope="session")
def trial(tree: KconfigTree) -> Callable[..., Trial]:
    """Return a function that builds a case of SETTINGS with changed symbols, ready to train."""

    @functools.cache
    def resolved(settings: tuple[tuple[str, SymbolValue], ...]) -> Mapping[str, SymbolValue]:
        return tree.resolve([ConfigLayer.of("test", "test", dict(settings))]).values

    def build(name: str, **changes: SymbolValue) -> Trial:
        settings = SETTINGS[name] | {"PRUNING_FREQUENCY": 5} | changes
        return Trial(resolved(tuple(settings.items())))

    return build


@pytest.fixture(params=list(SETTINGS))
def case(request: pytest.FixtureRequest) -> str:
    """Return every case in turn."""
    return str(request.param)
