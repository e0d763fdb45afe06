#!/usr/bin/env python3
"""Writes and explains .config, strictly: what is asked for takes effect, or nothing is written.

    configure.py defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'
    configure.py why N_LAYER              where its value came from, what it depends on
    configure.py why N_LAYER=48           and whether that value would take
    configure.py diffconfig .config.old .config
    configure.py diffconfig gpt2-124m gpt2-124m+quick

Results go to stdout, events and errors to stderr. Exit code 2 is an error of usage or
configuration; nothing was written. KCONFIG_CONFIG names another file than .config, and JSON=1
is --json.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import _start

from gpt2.config import Config
from lib import cli
from lib.kconfig import commands, queries
from lib.kconfig.place import Place
from lib.project import ROOT

PARSER = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
COMMANDS = PARSER.add_subparsers(required=True, metavar="COMMAND")


def add(
    name: str, text: str, run: Callable[..., str | None], json: bool = False
) -> argparse.ArgumentParser:
    """One more command; ``run`` takes the place and the arguments, and returns text for stdout."""
    parser = COMMANDS.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("-O", "--build-dir", type=Path, default=Path("."))
    parser.add_argument("--tree", type=Path, default=ROOT, help="folder of Kconfig and defconfigs")
    if json:
        wanted = os.environ.get("JSON", "0") not in ("", "0")
        parser.add_argument("--json", action="store_true", default=wanted)
    return parser


def main() -> int:
    """Run one command and print what it returns."""
    p = add("defconfig", "load NAME[+FRAGMENT...] into .config", commands.defconfig)
    p.add_argument("spec", metavar="NAME[+FRAGMENT...]")
    p.add_argument("--set", dest="settings", default="", metavar='"A=1 B=y"')
    add("olddefconfig", "drop what no longer applies, default what is new", commands.olddefconfig)
    add("savedefconfig", "write defconfig: what is not left to its default", commands.savedefconfig)
    add("menuconfig", "edit .config in a menu", commands.menuconfig)
    add("constants", "generate config.py from .config", commands.constants)
    p = add("why", "where a value came from, what it depends on", queries.explain, json=True)
    p.add_argument("question", metavar="NAME[=VALUE]")
    add("listnewconfig", "symbols that .config does not mention", queries.new_symbols, json=True)
    p = add("diffconfig", "what differs from A to B", queries.differences, json=True)
    p.add_argument("a", metavar="A", nargs="?", default="", help="a file or NAME[+FRAGMENT...]")
    p.add_argument("b", metavar="B", nargs="?", default="", help="default: .config.old .config")
    p = add("list-defconfigs", "the defconfigs and fragments", queries.show_defconfigs, json=True)
    p.add_argument("--plain", action="store_true", help="names only")

    options = vars(PARSER.parse_args())
    run, tree = options.pop("run"), options.pop("tree")
    # Another tree has symbols and rules of its own.
    rules = {"rules": Config.from_values} if tree == ROOT else {}
    text = run(Place(tree, options.pop("build_dir"), **rules), **options)
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    cli.run(main)
