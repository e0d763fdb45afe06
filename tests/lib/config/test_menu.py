"""Tests of menuconfig on a pseudo-terminal: change and save, or quit without saving."""

from pathlib import Path

import pytest

from lib.config.dotconfig import defconfig_layers, resolve_config
from lib.config.tree import KconfigTree
from tests.lib.terminal import Terminal


def menuconfig(root: Path, build: Path) -> Terminal:
    arguments = ["-m", "lib.kablate", "menuconfig", "--tree", str(root), "-O", str(build)]
    return Terminal(arguments, LINES="30", COLUMNS="90")


@pytest.fixture
def config(tree: KconfigTree, root: Path, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    tree.write_config(defconfig_layers(root, "base"), tmp_path / ".config")
    return tmp_path / ".config"


def set_layers_to_24(terminal: Terminal) -> None:
    terminal.wait_for("(12) Layers")
    terminal.press("\n", "Range: 1-48")
    terminal.press("\x7f\x7f24\nq", "Save configuration?")


def test_a_change_is_saved_and_its_origin_is_menuconfig(config, root, tree) -> None:
    before = config.read_bytes()
    terminal = menuconfig(root, config.parent)
    set_layers_to_24(terminal)
    terminal.press("y", "Configuration saved to")
    assert terminal.finish() == 0
    found = resolve_config(tree, config)
    origin = found.origins["N_LAYER"]
    assert found.values["N_LAYER"] == 24 and origin is not None and origin.label == "menuconfig"
    assert found.origins["N_HEAD"] is None
    assert config.with_name(".config.old").read_bytes() == before
    assert config.read_text() == tree.config_text(found)


def test_quitting_without_saving_changes_nothing(config, root) -> None:
    before = {path.name: path.read_bytes() for path in config.parent.iterdir()}
    terminal = menuconfig(root, config.parent)
    set_layers_to_24(terminal)
    terminal.press("n", "was not saved")
    assert terminal.finish() == 0
    assert before == {path.name: path.read_bytes() for path in config.parent.iterdir()}
