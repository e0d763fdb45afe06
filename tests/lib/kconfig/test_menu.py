"""menuconfig on a pseudo-terminal: change, save, and quit without saving."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.kconfig import Tree, defconfig_layers, resolve_config
from lib.project import ROOT

# More than enough for a busy machine; a passing test waits for text, not for time.
PATIENCE_SECONDS = 20


class Terminal:
    """menuconfig in a child process, driven by keys."""

    def __init__(self, root: Path, build: Path) -> None:
        self._ours, theirs = pty.openpty()
        script = str(ROOT / "scripts" / "configure.py")
        self._child = subprocess.Popen(
            [sys.executable, script, "menuconfig", "--tree", str(root), "-O", str(build)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "LINES": "30", "COLUMNS": "90"},
        )
        os.close(theirs)

    def press(self, keys: str, then_wait_for: str) -> None:
        """Type ``keys`` and read the screen until the text appears."""
        os.write(self._ours, keys.encode())
        self.wait_for(then_wait_for)

    def wait_for(self, text: str) -> None:
        """Read the screen until ``text`` appears."""
        seen = b""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([self._ours], [], [], 0.1)[0]:
                seen += os.read(self._ours, 65536)

    def finish(self) -> int:
        """The exit code."""
        code = self._child.wait(PATIENCE_SECONDS)
        os.close(self._ours)
        return code


@pytest.fixture
def config(tree: Tree, root: Path, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    tree.write_config(defconfig_layers(root, "base"), tmp_path / ".config")
    return tmp_path / ".config"


def set_layers_to_24(terminal: Terminal) -> None:
    terminal.wait_for("(12) Layers")
    terminal.press("\n", "Range: 1-48")
    terminal.press("\x7f\x7f24\nq", "Save configuration?")


def test_a_change_is_saved_and_its_origin_is_menuconfig(config, root, tree) -> None:
    before = config.read_bytes()
    terminal = Terminal(root, config.parent)
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
    terminal = Terminal(root, config.parent)
    set_layers_to_24(terminal)
    terminal.press("n", "was not saved")
    assert terminal.finish() == 0
    assert before == {path.name: path.read_bytes() for path in config.parent.iterdir()}
