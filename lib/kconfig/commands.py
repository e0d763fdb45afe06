"""Commands of ``configure.py`` that write files; each logs one line per event to stderr."""

from collections.abc import Mapping
from pathlib import Path

from lib.binding import Value
from lib.console import say
from lib.errors import ConfigError
from lib.files import write_atomic
from lib.kconfig.constants import read_constants, write_constants
from lib.kconfig.defconfigs import defconfig_layers
from lib.kconfig.dotconfig import read_config, with_origins
from lib.kconfig.layers import Layer
from lib.kconfig.menu import run_menuconfig
from lib.kconfig.place import Place
from lib.kconfig.tree import Tree


def defconfig(place: Place, spec: str, settings: str) -> None:
    """Load ``NAME[+FRAGMENT…]`` with ``SET`` on top into .config."""
    tree = Tree(place.root)
    layers = defconfig_layers(place.root, spec, settings)
    resolution = place.resolve(tree, layers)
    tree.write_config(resolution, place.config)
    for problem in resolution.hidden:
        say("CONFIG", f"no longer applies: {problem}")
    explicit = sum(origin is not None for origin in resolution.origins.values())
    count = len(resolution.values)
    say("CONFIG", f"{spec} -> {place.config} ({count} symbols, {explicit} set explicitly)")


def olddefconfig(place: Place) -> None:
    """Update .config: drop settings that no longer apply, use the defaults of new symbols."""
    tree = Tree(place.root)
    old = read_config(place.config) if place.config.exists() else Layer("config", ())
    adapted, dropped = tree.adapt(old)
    resolution = with_origins(tree, place.resolve(tree, [adapted]), place.config)
    new = tree.new_symbols(old)
    tree.write_config(resolution, place.config)
    for problem in dropped:
        say("WARN", f"dropped {problem}")
    count = len(resolution.values)
    say("CONFIG", f"{place.config} ({count} symbols, {len(dropped)} dropped, {len(new)} new)")


def savedefconfig(place: Place) -> None:
    """Write the settings that differ from their defaults to ``defconfig`` beside .config."""
    tree = Tree(place.root)
    target = place.config.with_name("defconfig")
    text = tree.minimal([read_config(place.config)])
    write_atomic(target, text)
    say("CONFIG", f"{place.config} -> {target} ({len(text.splitlines())} lines)")


def constants(place: Place) -> None:
    """Generate config.py from .config."""
    tree = Tree(place.root)
    layer = read_config(place.config)
    resolution = place.resolve(tree, [layer])
    new = tree.new_symbols(layer)
    target = place.build / "config.py"
    note = ""
    if target.exists():
        changed = _count_changed(_previous_constants(target), resolution.values)
        note = f", {changed} changed since the last write"
    write_constants(resolution, target)
    if new:
        say("CONFIG", f"{len(new)} new symbols at their defaults (make listnewconfig)")
    say("CONFIG", f"{place.config} -> {target} ({len(resolution.values)} symbols{note})")


def menuconfig(place: Place) -> None:
    """Edit .config in a menu."""
    run_menuconfig(Tree(place.root), place.config)


def _previous_constants(path: Path) -> dict[str, Value]:
    """Return the values of the last config.py; none if damaged, because it will be replaced."""
    try:
        return read_constants(path)
    except ConfigError:
        return {}


def _count_changed(before: Mapping[str, Value], after: Mapping[str, Value]) -> int:
    missing = object()
    names = before.keys() | after.keys()
    return sum(before.get(name, missing) != after.get(name, missing) for name in names)
