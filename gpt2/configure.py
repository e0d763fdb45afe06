"""The commands that write and explain ``.config``, strictly: every setting takes effect, or nothing is
written.

Exit code 2: usage or configuration; nothing was written. KCONFIG_CONFIG is another name of .config.
"""

import sys
from argparse import Namespace
from pathlib import Path

from gpt2.config import Config, StudyConfig
from gpt2.random_config import randconfig
from gpt2.study.resolve import step_layers
from gpt2.study.study_file import study_of
from lib.config import commands, dotconfig
from lib.config.dotconfig import ConfigWorkspace
from lib.config.field import from_symbols
from lib.config.layers import parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.console import terminal_columns
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.project import ROOT


def _place(options: Namespace) -> ConfigWorkspace:
    rules = {} if options.tree else {"rules": Config.from_values}
    return ConfigWorkspace(Path(options.tree or ROOT), options.build_dir, **rules)


def defconfig(options: Namespace) -> int:
    """Load NAME[+FRAGMENT...] into .config, with SET on top.

    kablate defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'

    Exit code 2: a setting would not take effect; nothing was written.
    """
    settings = f"{options.set} DRY_RUN=y" if options.dry_run else options.set
    commands.defconfig(_place(options), options.spec, settings.strip())
    return EXIT_DONE


def olddefconfig(options: Namespace) -> int:
    """Update .config to the current symbols: drop obsolete ones, use the defaults of new ones."""
    commands.olddefconfig(_place(options))
    return EXIT_DONE


def random(options: Namespace) -> int:
    """Write a random valid .config; without --seed, another one every time."""
    randconfig(_place(options), options.seed)
    return EXIT_DONE


def savedefconfig(options: Namespace) -> int:
    """Write the settings that differ from their defaults to defconfig, beside .config."""
    commands.savedefconfig(_place(options))
    return EXIT_DONE


def menuconfig(options: Namespace) -> int:
    """Edit .config in a menu."""
    commands.menuconfig(_place(options))
    return EXIT_DONE


def constants(options: Namespace) -> int:
    """Generate config.py from .config."""
    commands.write_config_py(_place(options))
    return EXIT_DONE


def why(options: Namespace) -> str:
    """Show the source and the dependencies of a value.

    kablate why N_LAYER[=48]         source of the value, dependencies, whether 48 takes effect
    kablate why N_LAYER --steps ra   the value in this step of the study
    """
    place = _place(options)
    if place.config.exists() and place.config_py.exists():
        # Raises if it was edited.
        dotconfig.read_generated(place)
    layers = [parse_command_line_settings(options.set)] if options.set else []
    if options.steps:
        tree = KconfigTree(place.root)
        values = dotconfig.resolve_config(tree, place.config, *layers).values
        study = study_of(from_symbols(StudyConfig, values), place.build)
        selected = study.select(options.steps)
        if len(selected) != 1:
            slugs = ", ".join(step.slug for step in selected)
            what = f"invalid value (expected one step, got {slugs})"
            advice = "type: make why SYM=NAME STEPS=ra"
            raise ConfigError(Problem(what, "STEPS", advice, code="usage.invalid-value"))
        layers += step_layers(study, selected[0])
    return _lines(commands.explain_symbol(place, options.sym, options.json, layers))


def diffconfig(options: Namespace) -> str:
    """List the differences between two configurations, in the format of the kernel's diffconfig.

    kablate diffconfig                          .config.old and .config
    kablate diffconfig gpt2-124m gpt2-124m+cpu  each a file or a NAME[+FRAGMENT...]
    """
    return _lines(commands.diff_config_files(_place(options), options.a, options.b, options.json))


def list_defconfigs(options: Namespace) -> str:
    """List the configurations and fragments of the tree."""
    return _lines(
        commands.format_defconfigs(_place(options), options.json, terminal_columns(sys.stdout))
    )


def _lines(text: str) -> str:
    return f"{text}\n" if text else ""
