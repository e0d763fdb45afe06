#!/usr/bin/env python3
"""Write and explain .config, strictly: every setting takes effect, or nothing is written.

    configure.py defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'
    configure.py why N_LAYER              source of the value, and the symbol's dependencies
    configure.py why N_LAYER=48           the same, and whether this value would take effect
    configure.py diffconfig .config.old .config
    configure.py diffconfig gpt2-124m gpt2-124m+quick

Results go to stdout, events and errors to stderr. Exit code 2 is a usage or configuration error;
nothing was written. KCONFIG_CONFIG replaces the file name .config, and JSON=1 is like --json.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import _start

from gpt2.config import Config
from lib import console
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace
from lib.project import ROOT

PARSER = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
COMMANDS = PARSER.add_subparsers(required=True, metavar="COMMAND")


def add(
    name: str, text: str, run: Callable[..., str | None], json: bool = False
) -> argparse.ArgumentParser:
    """Add a command. ``run`` is called with the place and the options and returns text for stdout."""
    parser = COMMANDS.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("-O", "--build-dir", type=Path, default=Path("."))
    parser.add_argument("--tree", type=Path, default=ROOT, help="folder of Kconfig and defconfigs")
    if json:
        default = os.environ.get("JSON", "0") not in ("", "0")
        parser.add_argument("--json", action="store_true", default=default)
    return parser


def main() -> int:
    """Run one command and print its result."""
    p = add("defconfig", "load NAME[+FRAGMENT...] into .config", commands.defconfig)
    p.add_argument("spec", metavar="NAME[+FRAGMENT...]")
    p.add_argument("--set", dest="settings", default="", metavar='"A=1 B=y"')
    add("olddefconfig", "drop obsolete symbols, default new ones", commands.olddefconfig)
    add("savedefconfig", "write the non-default settings to defconfig", commands.savedefconfig)
    add("menuconfig", "edit .config in a menu", commands.menuconfig)
    add("constants", "generate config.py from .config", commands.write_config_py)
    p = add("why", "source and dependencies of a value", commands.explain_symbol, json=True)
    p.add_argument("question", metavar="NAME[=VALUE]")
    add("listnewconfig", "list the symbols missing from .config", commands.new_symbols, json=True)
    p = add(
        "diffconfig", "list the differences between A and B", commands.diff_config_files, json=True
    )
    p.add_argument("a", metavar="A", nargs="?", default="", help="a file or NAME[+FRAGMENT...]")
    p.add_argument("b", metavar="B", nargs="?", default="", help="default: .config.old .config")
    p = add(
        "list-defconfigs", "list defconfigs and fragments", commands.format_defconfigs, json=True
    )
    p.add_argument("--plain", action="store_true", help="names only")

    options = vars(PARSER.parse_args())
    run, tree = options.pop("run"), options.pop("tree")
    # The rules apply only to this tree; another tree has different symbols.
    rules = {"rules": Config.from_values} if tree == ROOT else {}
    text = run(ConfigWorkspace(tree, options.pop("build_dir"), **rules), **options)
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    console.run_main(main)
