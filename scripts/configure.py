#!/usr/bin/env python3
"""Write and explain .config, strictly: every setting takes effect, or nothing is written.

    configure.py defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'
    configure.py why N_LAYER[=48]         source of the value, dependencies, whether 48 takes effect
    configure.py why N_LAYER --steps ra   the value in this step of the study

Exit code 2: usage or configuration; nothing was written. KCONFIG_CONFIG is another name of .config.
"""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

import _start

from gpt2.config import Config
from gpt2.planning.arguments import add_json, add_positional, add_variable
from gpt2.random_config import randconfig
from gpt2.study.resolve import why
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace
from lib.console import CommandLine, run_main, show
from lib.make_variables import require_read
from lib.project import ROOT

PARSER = CommandLine(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
# Variables of make whose options have other names; defconfig gets DRY_RUN= as a setting.
VARIABLES = {"settings": "SET", "spec": "DRY_RUN"}
COMMANDS = PARSER.add_subparsers(required=True, metavar="COMMAND")


def add(name: str, text: str, run: Callable[..., str | None], json: bool = False) -> CommandLine:
    """Add a command. ``run`` is called with the place and the options and returns text for stdout."""
    parser = COMMANDS.add_parser(name, help=text, description=text)
    parser.set_defaults(function=run, command=name)
    parser.add_argument("-O", "--build-dir", type=Path, default=Path("."))
    parser.add_argument("--tree", type=Path, default=ROOT, help="folder of Kconfig and defconfigs")
    if json:
        add_json(parser)
    return parser


def main() -> int:
    """Run one command and print its result."""
    p = add("defconfig", "load NAME[+FRAGMENT...] into .config", commands.defconfig)
    p.add_argument("spec", metavar="NAME[+FRAGMENT...]")
    p.add_argument("--set", dest="settings", default="", metavar='"A=1 B=y"')
    add("olddefconfig", "drop obsolete symbols, default new ones", commands.olddefconfig)
    p = add("randconfig", "draw a random .config", randconfig)
    add_variable(p, "seed", "random seed; without it, another configuration every time")
    add("savedefconfig", "write the non-default settings to defconfig", commands.savedefconfig)
    add("menuconfig", "edit .config in a menu", commands.menuconfig)
    add("constants", "generate config.py from .config", commands.write_config_py)
    p = add("why", "source and dependencies of a value", why, json=True)
    add_positional(p, "sym", "NAME, or NAME=VALUE")
    add_variable(p, "set", "settings on top of .config")
    add_variable(p, "steps", "one step of the study")
    add("listnewconfig", "list the symbols missing from .config", commands.new_symbols, json=True)
    p = add("diffconfig", "list differences between A and B", commands.diff_config_files, json=True)
    add_positional(p, "a", "a file or NAME[+FRAGMENT...]; default: .config.old")
    add_positional(p, "b", "default: .config")
    p = add("list-defconfigs", "list defconfigs", commands.format_defconfigs, json=True)
    p.add_argument("--plain", action="store_true", help="names only")

    options = vars(PARSER.parse_args())
    run, tree = options.pop("function"), options.pop("tree")
    require_read({VARIABLES.get(n, n.upper()) for n in options}, options.pop("command"))
    rules = {"rules": Config.from_values} if tree == ROOT else {}
    place = ConfigWorkspace(tree, options.pop("build_dir"), **rules)
    if text := run(place, **options):
        show(f"{text}\n")
    return 0


if __name__ == "__main__":
    run_main(main)
