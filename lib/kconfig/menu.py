"""kconfiglib's menuconfig on a ``.config``, with a record of the user's changes."""

import dataclasses
import os
import sys
from pathlib import Path

from lib.console import say
from lib.errors import ConfigError, Problem
from lib.kconfig.dotconfig import read_config, with_origins
from lib.kconfig.layers import Layer, Origin, Resolution, as_text
from lib.kconfig.tree import Tree


def run_menuconfig(tree: Tree, path: Path) -> None:
    """Edit ``path`` on the terminal; kconfiglib reads MENUCONFIG_STYLE.

    Lines of an old file that no longer apply are logged and dropped, as in olddefconfig. Raises
    ConfigError without a terminal, or if anything else in the file is invalid.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        advice = 'without a terminal, use make defconfig-NAME SET="A=1 B=y"'
        problem = Problem("menuconfig needs a terminal", next=advice, code="usage.no-terminal")
        raise ConfigError(problem)
    old = read_config(path) if path.exists() else Layer("config", ())
    adapted, dropped = tree.adapt(old)
    before = with_origins(tree, tree.resolve([adapted]), path)
    for problem in dropped:
        say("WARN", f"dropped {problem}")
    content = path.read_bytes() if path.exists() else b""
    _edit(tree, path)
    if path.exists() and path.read_bytes() != content:
        record_edits(tree, before, path)


def record_edits(tree: Tree, before: Resolution, path: Path) -> None:
    """Update the origins of ``path``: values that differ from ``before`` come from menuconfig."""
    after = tree.resolve([read_config(path)])
    origins = {name: _origin(tree, name, before, after) for name in after.values}
    tree.write_config(Resolution(after.values, origins, after.layers), path)


def _origin(tree: Tree, name: str, before: Resolution, after: Resolution) -> Origin | None:
    now = after.origins[name]
    if now is None:
        return None
    first = before.origins[name]
    if first is not None and before.values[name] == after.values[name]:
        return first
    item = tree.find(name)
    assert item is not None, name
    if tree.default(item) == as_text(after.values[name]):
        return None
    return dataclasses.replace(now, label="menuconfig")


def _edit(tree: Tree, path: Path) -> None:
    # Imported here because it needs curses, and Python may have been built without curses.
    from menuconfig import menuconfig

    # Absolute, because kconfiglib also searches the source tree for a relative path.
    os.environ["KCONFIG_CONFIG"] = str(path.absolute())
    menuconfig(tree.kconf)
