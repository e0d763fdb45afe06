"""Fixture tree: small, with a choice spread over files, derived symbols and nested dependencies."""

from pathlib import Path

import pytest

from lib.config.layers import parse_text
from lib.config.tree import KconfigTree
from lib.errors import ConfigError

FIXTURE = Path(__file__).with_name("fixtures") / "tree"


@pytest.fixture(scope="session")
def root():
    """Return the folder of the fixture tree."""
    return FIXTURE


@pytest.fixture
def tree(root):
    """Return the parsed fixture tree."""
    return KconfigTree(root)


@pytest.fixture
def refused(tree):
    """Return a function that resolves texts or layers and returns the problems raised."""

    def resolve(*sources):
        layers = [
            parse_text(source, "defconfig", "f") if isinstance(source, str) else source
            for source in sources
        ]
        with pytest.raises(ConfigError) as caught:
            tree.resolve(layers)
        assert caught.value.exit_code == 2
        return list(caught.value.problems)

    return resolve
