"""The fixture tree: small, with a choice spread over files, derived symbols and nested needs."""

from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.kconfig import Layer, Tree, parse_text

FIXTURE = Path(__file__).with_name("fixtures") / "tree"


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the fixture tree."""
    return FIXTURE


@pytest.fixture
def tree(root: Path) -> Tree:
    """The fixture tree, parsed."""
    return Tree(root)


@pytest.fixture
def refused(tree: Tree):
    """A function from the text of a file, or a layer, to the errors it causes, without advice."""

    def resolve(*sources: str | Layer) -> list[str]:
        layers = [
            parse_text(source, "defconfig", "f") if isinstance(source, str) else source
            for source in sources
        ]
        with pytest.raises(ConfigError) as caught:
            tree.resolve(layers)
        assert caught.value.exit_code == 2
        return [f"{problem.where}: {problem.what}" for problem in caught.value.problems]

    return resolve
