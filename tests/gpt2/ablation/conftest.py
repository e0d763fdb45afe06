"""Full configurations at several sizes, as a .config would hold them."""

from collections.abc import Callable

import pytest

from lib.binding import Value
from lib.kconfig import Layer, Tree, parse_text


@pytest.fixture(scope="session")
def tree() -> Tree:
    return Tree()


@pytest.fixture(scope="session")
def full_config(tree: Tree) -> Callable[..., Layer]:
    """The .config of some settings, every symbol written out."""

    def make(**settings: Value) -> Layer:
        given = {"DEVICE_CPU": True, "OPTIMIZER_ADAMWSPAM": True, "RA_MLA_ABLATION_MODE": True}
        text = tree.config_text([Layer.of("defconfig", "test", {**given, **settings})])
        return parse_text(text, "config", ".config")

    return make
