"""Fixtures: the Kconfig tree and every case in turn."""

import functools

import pytest

from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from tests.lib.pruning.cases import SETTINGS, Trial


@pytest.fixture(scope="session")
def tree():
    """Return the Kconfig tree."""
    return KconfigTree()


@pytest.fixture(scope="session")
def trial(tree):
    """Return a function that builds a case of SETTINGS with changed symbols, ready to train."""

    @functools.cache
    def resolved(settings):
        return tree.resolve([ConfigLayer.of("test", "test", dict(settings))]).values

    def build(name, **changes):
        settings = SETTINGS[name] | {"PRUNING_FREQUENCY": 5} | changes
        return Trial(resolved(tuple(settings.items())))

    return build


# Each scope, ramp, kind of state and class of pruner; formulas are compared in every case.
_KINDS = (
    *("magnitude-layer-cubic", "magnitude-global-linear", "movement-global-cubic", "movement-sgd"),
    *("bitter0", "bitter4", "bitter8-spam"),
)


@pytest.fixture(params=_KINDS)
def case(request):
    """Return a case of each kind in turn."""
    return str(request.param)
