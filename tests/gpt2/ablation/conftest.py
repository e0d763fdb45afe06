"""Full configurations at several sizes, as a .config would hold them."""

from collections.abc import Callable

import pytest

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree


@pytest.fixture(scope="session")
def tree() -> KconfigTree:
    return KconfigTree()


@pytest.fixture(scope="session")
def full_config(tree: KconfigTree) -> Callable[..., ConfigLayer]:
    """The .config of some settings, every symbol written out."""

    def make(**settings: SymbolValue) -> ConfigLayer:
        given = {"DEVICE_CPU": True, "OPTIMIZER_ADAMWSPAM": True, "RA_MLA_ABLATION_MODE": True}
        text = tree.config_text([ConfigLayer.of("defconfig", "test", {**given, **settings})])
        return parse_text(text, "config", ".config")

    return make
