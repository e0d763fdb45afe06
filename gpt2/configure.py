"""The commands that write and explain ``.config``, strictly: every setting takes effect, or nothing is
written.

Exit code 2: usage or configuration; nothing was written. KCONFIG_CONFIG is another name of .config.
"""

import sys
from argparse import Namespace
from pathlib import Path

from gpt2.config import Config
from gpt2.random_config import randconfig
from gpt2.study import resolve
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace
from lib.console import terminal_columns
from lib.errors import EXIT_DONE
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
    o = options
    return _lines(resolve.why(_place(o), o.sym, o.json, o.set, o.steps))


def listnewconfig(options: Namespace) -> str:
    """List the symbols that .config does not mention, with their defaults."""
    return _lines(commands.new_symbols(_place(options), options.json))


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
