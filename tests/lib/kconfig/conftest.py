"""Fixture tree: small, with a choice spread over files, derived symbols and nested dependencies."""

from pathlib import Path

import pytest

from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree, parse_text

FIXTURE = Path(__file__).with_name("fixtures") / "tree"


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the folder of the fixture tree."""
    return FIXTURE


@pytest.fixture
def tree(root: Path) -> Tree:
    """Return the parsed fixture tree."""
    return Tree(root)


@pytest.fixture
def refused(tree: Tree):
    """Return a function that resolves texts or layers and returns the problems raised."""

    def resolve(*sources: str | Layer) -> list[Problem]:
        layers = [
            parse_text(source, "defconfig", "f") if isinstance(source, str) else source
            for source in sources
        ]
        with pytest.raises(ConfigError) as caught:
            tree.resolve(layers)
        assert caught.value.exit_code == 2
        return list(caught.value.problems)

    return resolve
