#!/usr/bin/env python3
"""Write and explain .config, strictly: every setting takes effect, or nothing is written.

    configure.py defconfig gpt2-124m+quick --set 'N_LAYER=4 OUTPUT_DIR="my results"'
    configure.py why N_LAYER              source of the value, and the symbol's dependencies
    configure.py why N_LAYER=48           the same, and whether this value would take effect
    configure.py why N_LAYER --steps ra   the value in this step of the study
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

from gpt2.ablation import STUDIES
from gpt2.ablation.resolve import step_layers
from gpt2.config import Config
from lib import console
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace, resolve_config
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.make_variables import TARGET, require_read
from lib.project import ROOT

PARSER = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
# Variables of make whose options have other names; defconfig gets DRY_RUN= as a setting.
VARIABLES = {"question": "SYM", "settings": "SET", "spec": "DRY_RUN"}
COMMANDS = PARSER.add_subparsers(required=True, metavar="COMMAND")


def add(
    name: str, text: str, run: Callable[..., str | None], json: bool = False
) -> argparse.ArgumentParser:
    """Add a command. ``run`` is called with the place and the options and returns text for stdout."""
    parser = COMMANDS.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run, command=name)
    parser.add_argument("-O", "--build-dir", type=Path, default=Path("."))
    parser.add_argument("--tree", type=Path, default=ROOT, help="folder of Kconfig and defconfigs")
    if json:
        default = os.environ.get("JSON", "0") not in ("", "0")
        parser.add_argument("--json", action="store_true", default=default)
    return parser


def layers_on_top(place: ConfigWorkspace, settings: str, steps: str) -> list[ConfigLayer]:
    """Return the layers of SET= and of one step of the study. Raises ConfigError for several steps."""
    layers = [parse_command_line_settings(settings)] if settings else []
    if not steps:
        return layers
    values = resolve_config(KconfigTree(place.root), place.config, *layers).values
    study = STUDIES[str(values["ABLATION_STUDY"])]
    selected = study.select(steps)
    if len(selected) != 1:
        names = ", ".join(step.slug for step in selected)
        what = f"expected one step, got {names}"
        raise ConfigError(Problem(what, "STEPS", code="usage.invalid-value"))
    return [*layers, *step_layers(study, selected[0])]


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
    p.add_argument("question", metavar="NAME[=VALUE]", nargs="?", default=os.environ.get("SYM", ""))
    p.add_argument("--set", default=os.environ.get("SET", ""), metavar='"A=1 B=y"')
    p.add_argument("--steps", default=os.environ.get("STEPS", ""), help="one step of the study")
    add("listnewconfig", "list the symbols missing from .config", commands.new_symbols, json=True)
    p = add(
        "diffconfig", "list the differences between A and B", commands.diff_config_files, json=True
    )
    for name, text in (
        ("a", "a file or NAME[+FRAGMENT...]"),
        ("b", "default: .config.old .config"),
    ):
        given = os.environ.get(name.upper(), "")
        p.add_argument(name, metavar=name.upper(), nargs="?", default=given, help=text)
    p = add(
        "list-defconfigs", "list defconfigs and fragments", commands.format_defconfigs, json=True
    )
    p.add_argument("--plain", action="store_true", help="names only")

    options = vars(PARSER.parse_args())
    run, tree = options.pop("run"), options.pop("tree")
    # make also writes .config and config.py before other commands; their variables are not for it.
    if os.environ.get(TARGET, "").startswith(options.pop("command")):
        require_read({VARIABLES.get(name, name.upper()) for name in options})
    # The rules apply only to this tree; another tree has different symbols.
    rules = {"rules": Config.from_values} if tree == ROOT else {}
    place = ConfigWorkspace(tree, options.pop("build_dir"), **rules)
    if run is commands.explain_symbol:
        options["layers"] = layers_on_top(place, options.pop("set"), options.pop("steps"))
    text = run(place, **options)
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    console.run_main(main)
