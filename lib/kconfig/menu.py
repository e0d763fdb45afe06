"""Runs kconfiglib's menuconfig on a ``.config``, and records what the user changed in it."""

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
    """Edit ``path`` on the terminal; MENUCONFIG_STYLE is kconfiglib's.

    Lines of an old file that no longer apply are told and left out, as olddefconfig does. Raises
    ConfigError without a terminal, or when the file has anything else wrong.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        advice = 'make defconfig-NAME SET="A=1 B=y" needs none'
        raise ConfigError(Problem("menuconfig needs a terminal", next=advice))
    old = read_config(path) if path.exists() else Layer("config", ())
    adapted, dropped = tree.adapt(old)
    before = with_origins(tree, tree.resolve([adapted]), path)
    for problem in dropped:
        say("WARN", f"menuconfig leaves out {problem}")
    content = path.read_bytes() if path.exists() else b""
    _edit(tree, path)
    if path.exists() and path.read_bytes() != content:
        record_edits(tree, before, path)


def record_edits(tree: Tree, before: Resolution, path: Path) -> None:
    """Rewrite the origins of ``path``: what differs from ``before`` came from menuconfig."""
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
    # curses is needed here only, and Python may have been built without it.
    from menuconfig import menuconfig

    # An absolute name: kconfiglib looks for a relative one in the source tree too.
    os.environ["KCONFIG_CONFIG"] = str(path.absolute())
    menuconfig(tree.kconf)
