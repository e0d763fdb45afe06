"""Read-only ``configure.py`` commands; each returns text or JSON for stdout."""

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from kconfiglib import escape

from lib.errors import ConfigError, Problem
from lib.kconfig.defconfigs import Defconfig, defconfig_layers, list_defconfigs
from lib.kconfig.diff import diff, render_diff
from lib.kconfig.dotconfig import read_config, resolve_config
from lib.kconfig.origins import SCHEMA_VERSION
from lib.kconfig.parse import parse_text, read_file
from lib.kconfig.place import Place
from lib.kconfig.tree import Tree
from lib.kconfig.why import render_why, why


def explain(place: Place, question: str, json: bool) -> str:
    """Explain the value of NAME, or whether NAME=VALUE would take effect."""
    tree = Tree(place.root)
    explanation = why(tree, resolve_config(tree, place.config), question)
    return _document(explanation) if json else render_why(explanation)


def new_symbols(place: Place, json: bool) -> str:
    """List the symbols that .config does not mention, with their defaults."""
    tree = Tree(place.root)
    layer = read_config(place.config)
    adapted, _ = tree.adapt(layer)
    tree.resolve([adapted])
    new = tree.new_symbols(layer)
    if json:
        return _document({"symbols": {s.name: s.str_value for s in new}})
    return "".join(symbol.config_string for symbol in new).rstrip("\n")


def differences(place: Place, a: str, b: str, json: bool) -> str:
    """Compare A with B, each a file or a NAME[+FRAGMENT…].

    An empty A is .config.old, an empty B is .config.
    """
    old = place.config.with_name(place.config.name + ".old")
    if not a and not old.exists():
        what = "no previous configuration to compare with"
        raise ConfigError(Problem(what, str(old), "make diffconfig A=NAME", code="config.missing"))
    result = diff(_assignments(place, a or str(old)), _assignments(place, b or str(place.config)))
    return _document(asdict(result)) if json else render_diff(result)


def show_defconfigs(place: Place, json: bool, plain: bool) -> str:
    """List the defconfigs and fragments, each with its first comment line."""
    bases, fragments = list_defconfigs(place.root)
    if json:
        fields = {"defconfigs": bases, "fragments": fragments}
        return _document({key: [_plain(d) for d in listed] for key, listed in fields.items()})
    if plain:
        return "\n".join([d.name for d in bases] + [f"+{d.name}" for d in fragments])
    width = max((len(d.name) for d in [*bases, *fragments]), default=0) + 2
    lines = ["make defconfig-NAME"]
    lines += [f"  {d.name:{width}}{d.summary}" for d in bases]
    lines += ["", "make defconfig-NAME+FRAGMENT+…"]
    lines += [f"  {d.name:{width}}{d.summary}{_bases_note(d)}" for d in fragments]
    return "\n".join(lines)


def _bases_note(fragment: Defconfig) -> str:
    if not fragment.bases:
        return ""
    return " [any]" if "*" in fragment.bases else f" [{', '.join(fragment.bases)}]"


def _plain(defconfig: Defconfig) -> dict[str, Any]:
    return {"name": defconfig.name, "summary": defconfig.summary, "bases": list(defconfig.bases)}


def _document(content: Mapping[str, Any]) -> str:
    document = {"schema_version": SCHEMA_VERSION, **content}
    return dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)


def _assignments(place: Place, source: str) -> dict[str, str]:
    """Return values by name, strings in quotes; a file as written, a NAME[+FRAGMENT…] in full."""
    if "/" in source or source.startswith(".") or Path(source).exists():
        layer = read_file(Path(source), "config")
    else:
        tree = Tree(place.root)
        text = tree.config_text(defconfig_layers(place.root, source))
        layer = parse_text(text, "config", source)
    if layer.problems:
        raise ConfigError(*layer.problems)
    return {a.name: f'"{escape(a.value)}"' if a.quoted else a.value for a in layer.assignments}
