"""Fixtures: the options of every case, bound from a resolved configuration."""

import pytest

from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.options import OPTIMIZERS
from tests.lib.optim.cases import SETTINGS


@pytest.fixture(scope="session")
def tree():
    """Return the Kconfig tree."""
    return KconfigTree()


@pytest.fixture(scope="session")
def options_of(tree):
    """Return a function from symbols to an optimizer's options."""

    def bound(settings):
        return OPTIMIZERS.bind(tree.resolve([ConfigLayer.of("test", "test", settings)]).values)[0]

    return bound


# AdamWPrune is built as its base: ``test_adamwprune_is_its_base``.
@pytest.fixture(params=[name for name in SETTINGS if not name.startswith("adamwprune")])
def options(request, options_of):
    """Return the options of each rule in turn."""
    return options_of(SETTINGS[request.param])
