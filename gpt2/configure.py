"""The commands that write and explain ``.config``, strictly: every setting takes effect, or nothing is
written.

Exit code 2: usage or configuration; nothing was written. KCONFIG_CONFIG is another name of .config.
"""

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.config import Config, StudyConfig
from gpt2.random_config import random_settings
from gpt2.study.resolve import step_layers
from gpt2.study.study_file import study_of
from lib.config.check import GONE_OFF
from lib.config.dotconfig import (
    ConfigWorkspace,
    defconfig_layers,
    read_config,
    read_generated,
    resolve_config,
    with_origins,
    write_constants,
)
from lib.config.dotconfig import (
    list_defconfigs as listed_defconfigs,
)
from lib.config.explain import explain_value, format_explanation
from lib.config.field import from_symbols
from lib.config.layers import (
    SCHEMA_VERSION,
    ConfigLayer,
    ResolvedConfig,
    parse_command_line_settings,
)
from lib.config.tree import KconfigTree
from lib.console import folded, log, terminal_columns
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.files import pretty_json, write_atomic
from lib.make_variables import require_value
from lib.project import ROOT
from lib.units import first_of


def _place(options: Namespace) -> ConfigWorkspace:
    return ConfigWorkspace(ROOT, options.build_dir)


def defconfig(options: Namespace) -> int:
    """Load NAME[+FRAGMENT...] into .config, with SET on top.

    kablate defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'

    Exit code 2: a setting would not take effect; nothing was written.
    """
    place, tree = _place(options), KconfigTree()
    settings = f"{options.set} DRY_RUN=y" if options.dry_run else options.set
    layers = defconfig_layers(ROOT, options.spec, settings.strip())
    resolution = tree.checked(layers, Config.from_values)[0]
    note = _changes(place, resolution)
    tree.write_config(resolution, place.config)
    for problem in resolution.hidden:
        log("CONFIG", f"{problem.where} has no effect with the settings on top: {problem.what}")
    explicit = sum(origin is not None for origin in resolution.origins.values())
    count = len(resolution.values)
    log("CONFIG", f"{options.spec} -> {place.config} ({count} symbols, {explicit} set explicitly)")
    write_constants(resolution, place)
    log("CONFIG", f"{place.config} -> {place.config_py} ({count} symbols{note})")
    return EXIT_DONE


def olddefconfig(options: Namespace) -> int:
    """Update .config to the current symbols: drop obsolete ones, use the defaults of new ones."""
    place, tree = _place(options), KconfigTree()
    old, adapted, dropped = _adapted(tree, place.config)
    resolution = tree.checked([adapted], Config.from_values)[0]
    resolution = with_origins(tree, resolution, place.config)
    new = [symbol.name for symbol in tree.new_symbols(old)]
    tree.write_config(resolution, place.config)
    _log_dropped(dropped)
    changes = f"{len(dropped)} dropped, {len(new)} new" + f": {', '.join(new)}" * bool(new)
    log("CONFIG", f"{place.config} ({len(resolution.values)} symbols, {changes})")
    return EXIT_DONE


def _adapted(tree: KconfigTree, config: Path) -> tuple[ConfigLayer, ConfigLayer, list[Problem]]:
    """Return an old file, the part of it that still applies, and the problems of the other lines."""
    old = read_config(config) if config.exists() else ConfigLayer("config", ())
    return old, *tree.adapt(old)


def _log_dropped(dropped: Sequence[Problem]) -> None:
    for problem in dropped:
        what = dataclasses.replace(problem, next="")
        log("CONFIG" if problem.code == GONE_OFF else "WARN", f"dropped {what}")


def random(options: Namespace) -> int:
    """Write a random valid .config; without --seed, another one every time."""
    place, tree = _place(options), KconfigTree()
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    settings = random_settings(tree, Config.from_values, seed)
    layer = ConfigLayer.of("defconfig", f"randconfig SEED={seed}", settings)
    tree.write_config(tree.checked([layer], Config.from_values)[0], place.config)
    log("CONFIG", f"randconfig SEED={seed} -> {place.config} ({len(settings)} symbols set)")
    return EXIT_DONE


def savedefconfig(options: Namespace) -> int:
    """Write the settings that differ from their defaults to defconfig, beside .config."""
    place = _place(options)
    target = place.config.with_name("defconfig")
    text = KconfigTree().minimal([read_config(place.config)])
    write_atomic(target, text)
    log("CONFIG", f"{place.config} -> {target} ({len(text.splitlines())} lines)")
    return EXIT_DONE


def constants(options: Namespace) -> int:
    """Generate config.py from .config."""
    place, tree = _place(options), KconfigTree()
    layer = read_config(place.config)
    resolution = tree.checked([layer], Config.from_values)[0]
    new = [symbol.name for symbol in tree.new_symbols(layer)]
    note = _changes(place, resolution)
    write_constants(resolution, place)
    if new:
        log("CONFIG", f"new symbol{'s' * (len(new) > 1)}, at the default: {first_of(new)}")
    log("CONFIG", f"{place.config} -> {place.config_py} ({len(resolution.values)} symbols{note})")
    return EXIT_DONE


def _changes(place: ConfigWorkspace, resolution: ResolvedConfig) -> str:
    """Return the number of changed values against config.py as the end of a message; "" without one.

    Raises ConfigError if the file was edited, because the edit would be lost.
    """
    # Without .config, config.py is that of another file (KCONFIG_CONFIG).
    if not (place.config_py.exists() and place.config.exists()):
        return ""
    before, after = read_generated(place)[0], resolution.values
    return f", {len(after.items() - before.items())} new or changed since the last write"


def menuconfig(options: Namespace) -> int:
    """Edit .config in a menu.

    The file is saved by the menu; exit code 2 lists the rules across its values that are broken.
    """
    place, tree = _place(options), KconfigTree()
    _edit(tree, place.config)
    tree.checked([read_config(place.config)], Config.from_values)
    return EXIT_DONE


def _edit(tree: KconfigTree, path: Path) -> None:
    """Edit ``path`` on the terminal; kconfiglib reads MENUCONFIG_STYLE.

    Lines of an old file that no longer apply are logged and dropped, as in olddefconfig. Raises
    ConfigError without a terminal, or if anything else in the file is invalid.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        advice = 'without a terminal, use make defconfig-NAME SET="A=1 B=y"'
        problem = Problem("menuconfig needs a terminal", next=advice, code="usage.no-terminal")
        raise ConfigError(problem)
    # Imported here because it needs curses, and Python may have been built without curses.
    from menuconfig import menuconfig as edit_in_menu

    _, adapted, dropped = _adapted(tree, path)
    tree.resolve([adapted])
    _log_dropped(dropped)
    # Absolute, because kconfiglib also searches the source tree for a relative path.
    os.environ["KCONFIG_CONFIG"] = str(path.absolute())
    edit_in_menu(tree.kconf)


def why(options: Namespace) -> str:
    """Show the source and the dependencies of a value.

    kablate why N_LAYER[=48]         source of the value, dependencies, whether 48 takes effect
    kablate why N_LAYER --steps ra   the value in this step of the study
    """
    place, tree = _place(options), KconfigTree()
    require_value(options.sym, "SYM", "make why SYM=NAME")
    if place.config.exists() and place.config_py.exists():
        # Raises if it was edited.
        read_generated(place)
    layers = [parse_command_line_settings(options.set)] if options.set else []
    if options.steps:
        values = resolve_config(tree, place.config, *layers).values
        study = study_of(from_symbols(StudyConfig, values), place.build)
        selected = study.select(options.steps)
        if len(selected) != 1:
            slugs = ", ".join(step.slug for step in selected)
            what = f"invalid value (expected one step, got {slugs})"
            advice = "type: make why SYM=NAME STEPS=ra"
            raise ConfigError(Problem(what, "STEPS", advice, code="usage.invalid-value"))
        layers += step_layers(study, selected[0])
    explanation = explain_value(tree, resolve_config(tree, place.config, *layers), options.sym)
    return _document(explanation) if options.json else format_explanation(explanation)


def list_defconfigs(options: Namespace) -> str:
    """List the configurations and fragments of the tree, each with its first comment line."""
    bases, fragments = listed_defconfigs(ROOT)
    if options.json:
        groups = {"defconfigs": bases, "fragments": fragments}
        return _document(
            {
                key: [{"name": d.name, "summary": d.summary, "bases": d.bases} for d in group]
                for key, group in groups.items()
            }
        )
    width = max(len(d.name) for d in [*bases, *fragments]) + 2
    lines = ["make defconfig-NAME"]
    lines += [f"  {d.name:{width}}{d.summary}" for d in bases]
    lines += ["", "make defconfig-NAME+FRAGMENT+…"]
    for each in fragments:
        known = "any" if "*" in each.bases else ", ".join(each.bases)
        lines.append(f"  {each.name:{width}}{each.summary} [{known}]")
    return folded("\n".join(lines), terminal_columns(sys.stdout), " " * (width + 2)) + "\n"


def _document(content: dict[str, Any]) -> str:
    return pretty_json({"schema_version": SCHEMA_VERSION, **content})
