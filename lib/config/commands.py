"""kconfiglib's menuconfig on a ``.config``, with a record of the user's changes."""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any

import kconfiglib
from kconfiglib import Choice, Symbol, escape

from lib.config.check import (
    GONE_OFF,
    condition_text,
    current_values,
    is_settable,
    range_text,
    requirements,
    selecting_symbols,
)
from lib.config.dotconfig import (
    ConfigWorkspace,
    Defconfig,
    defconfig_layers,
    list_defconfigs,
    read_config,
    read_generated,
    resolve_config,
    with_origins,
    write_constants,
)
from lib.config.layers import (
    SCHEMA_VERSION,
    ConfigLayer,
    ResolvedConfig,
    ValueOrigin,
    parse_command_line_settings,
    parse_text,
    read_file,
    to_kconfig_text,
)
from lib.config.tree import FIND_SYMBOL, KconfigTree, describe_symbol, typed_value
from lib.console import confirm, folded, log
from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.make_variables import require_value
from lib.units import first_of


def run_menuconfig(tree: KconfigTree, path: Path) -> None:
    """Edit ``path`` on the terminal; kconfiglib reads MENUCONFIG_STYLE.

    Lines of an old file that no longer apply are logged and dropped, as in olddefconfig. Raises
    ConfigError without a terminal, or if anything else in the file is invalid.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        advice = 'without a terminal, use make defconfig-NAME SET="A=1 B=y"'
        problem = Problem("menuconfig needs a terminal", next=advice, code="usage.no-terminal")
        raise ConfigError(problem)
    old = read_config(path) if path.exists() else ConfigLayer("config", ())
    adapted, dropped = tree.adapt(old)
    before = with_origins(tree, tree.resolve([adapted]), path)
    _log_dropped(dropped)
    content = path.read_bytes() if path.exists() else b""
    _edit(tree, path)
    if path.exists() and path.read_bytes() != content:
        record_edits(tree, before, path)


def record_edits(tree: KconfigTree, before: ResolvedConfig, path: Path) -> None:
    """Update the origins of ``path``: values that differ from ``before`` come from menuconfig."""
    after = tree.resolve([read_config(path)])
    origins = {name: _origin(tree, name, before, after) for name in after.values}
    tree.write_config(ResolvedConfig(after.values, origins, after.layers), path)


def _origin(
    tree: KconfigTree, name: str, before: ResolvedConfig, after: ResolvedConfig
) -> ValueOrigin | None:
    now = after.origins[name]
    if now is None:
        return None
    first = before.origins[name]
    if first is not None and before.values[name] == after.values[name]:
        return first
    item = tree.find(name)
    assert item is not None, name
    if tree.default(item) == to_kconfig_text(after.values[name]):
        return None
    return dataclasses.replace(now, label="menuconfig")


def _edit(tree: KconfigTree, path: Path) -> None:
    # Imported here because it needs curses, and Python may have been built without curses.
    from menuconfig import menuconfig

    # Absolute, because kconfiglib also searches the source tree for a relative path.
    os.environ["KCONFIG_CONFIG"] = str(path.absolute())
    menuconfig(tree.kconf)


# Commands that write files; each logs one line per event to stderr.


def defconfig(place: ConfigWorkspace, spec: str, settings: str) -> None:
    """Load ``NAME[+FRAGMENT…]`` with ``SET`` on top into .config, and generate config.py."""
    tree = KconfigTree(place.root)
    layers = defconfig_layers(place.root, spec, settings)
    resolution = place.resolve(tree, layers)
    note = _changes(place, resolution)
    tree.write_config(resolution, place.config)
    for problem in resolution.hidden:
        log("CONFIG", f"{problem.where} has no effect with the settings on top: {problem.what}")
    explicit = sum(origin is not None for origin in resolution.origins.values())
    count = len(resolution.values)
    log("CONFIG", f"{spec} -> {place.config} ({count} symbols, {explicit} set explicitly)")
    write_constants(resolution, place)
    log("CONFIG", f"{place.config} -> {place.config_py} ({count} symbols{note})")


def olddefconfig(place: ConfigWorkspace) -> None:
    """Update .config: drop settings that no longer apply, use the defaults of new symbols."""
    tree = KconfigTree(place.root)
    old = read_config(place.config) if place.config.exists() else ConfigLayer("config", ())
    adapted, dropped = tree.adapt(old)
    resolution = with_origins(tree, place.resolve(tree, [adapted]), place.config)
    new = tree.new_symbols(old)
    tree.write_config(resolution, place.config)
    _log_dropped(dropped)
    count, names = len(resolution.values), ", ".join(symbol.name for symbol in new)
    changes = f"{len(dropped)} dropped, {len(new)} new{f': {names}' if new else ''}"
    log("CONFIG", f"{place.config} ({count} symbols, {changes})")


def savedefconfig(place: ConfigWorkspace) -> None:
    """Write the settings that differ from their defaults to ``defconfig`` beside .config."""
    tree = KconfigTree(place.root)
    target = place.config.with_name("defconfig")
    text = tree.minimal([read_config(place.config)])
    write_atomic(target, text)
    log("CONFIG", f"{place.config} -> {target} ({len(text.splitlines())} lines)")


def write_config_py(place: ConfigWorkspace) -> None:
    """Generate config.py from .config."""
    tree = KconfigTree(place.root)
    layer = read_config(place.config)
    resolution = place.resolve(tree, [layer])
    new = tree.new_symbols(layer)
    note = _changes(place, resolution)
    write_constants(resolution, place)
    if new:
        names = first_of([symbol.name for symbol in new])
        log("CONFIG", f"new symbol{'s' * (len(new) > 1)}, at the default: {names}")
    log("CONFIG", f"{place.config} -> {place.config_py} ({len(resolution.values)} symbols{note})")


def menuconfig(place: ConfigWorkspace) -> None:
    """Edit .config in a menu, again if a rule across its values is broken and the user confirms."""
    tree = KconfigTree(place.root)
    edit_until_valid(
        lambda: run_menuconfig(tree, place.config),
        lambda: place.resolve(tree, [read_config(place.config)]),
        lambda: confirm("edit again?", yes=False),
    )


def edit_until_valid(
    edit: Callable[[], object], check: Callable[[], object], again: Callable[[], object]
) -> None:
    """Call ``edit`` until ``check`` raises no ConfigError; ``again`` raises one to give up."""
    while True:
        edit()
        try:
            check()
            return
        except ConfigError as error:
            for problem in error.problems:
                log("ERROR", str(problem))
        again()


def _log_dropped(dropped: Sequence[Problem]) -> None:
    for problem in dropped:
        log("CONFIG" if problem.code == GONE_OFF else "WARN", f"dropped {problem}")


def _changes(place: ConfigWorkspace, resolution: ResolvedConfig) -> str:
    """Return the number of changed values against config.py as the end of a message; "" without one.

    Raises ConfigError if the file was edited, because the edit would be lost.
    """
    # Without .config, config.py is that of another file (KCONFIG_CONFIG).
    if not (place.config_py.exists() and place.config.exists()):
        return ""
    before, after = read_generated(place)[0], resolution.values
    missing = object()
    names = before.keys() | after.keys()
    count = sum(before.get(name, missing) != after.get(name, missing) for name in names)
    return f", {count} changed since the last write"


# Differences between two configurations, in the format of the kernel's diffconfig.


@dataclass(frozen=True)
class ConfigDiff:
    """Settings only in A, in both with different values, and only in B."""

    removed: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]
    added: Mapping[str, str]


def diff_configs(a: Mapping[str, str], b: Mapping[str, str]) -> ConfigDiff:
    """Compare two mappings of names to values."""
    return ConfigDiff(
        removed={name: a[name] for name in sorted(a.keys() - b.keys())},
        changed={n: (a[n], b[n]) for n in sorted(a.keys() & b.keys()) if a[n] != b[n]},
        added={name: b[name] for name in sorted(b.keys() - a.keys())},
    )


def format_diff(difference: ConfigDiff) -> str:
    """Format one line per setting: ``-NAME value``, `` NAME old -> new`` or ``+NAME value``."""
    lines = [f"-{name} {value}" for name, value in difference.removed.items()]
    lines += [f" {name} {old} -> {new}" for name, (old, new) in difference.changed.items()]
    lines += [f"+{name} {value}" for name, value in difference.added.items()]
    return "\n".join(lines)


# Explanation of one symbol or choice: its value, the origin of the value, and its dependencies.


def explain_value(tree: KconfigTree, resolution: ResolvedConfig, question: str) -> dict[str, Any]:
    """Explain ``NAME`` as plain data; ``NAME=VALUE`` also tries the assignment.

    Raises ConfigError with the nearest names if there is no such symbol or choice.
    """
    name = question.partition("=")[0].removeprefix("CONFIG_")
    item = tree.find(name)
    if item is None:
        what, code = tree.unknown_symbol(name)
        raise ConfigError(Problem(f"{name}: {what}", "SYM", FIND_SYMBOL, code=code))
    trial = (
        _try(tree, resolution, parse_command_line_settings([question])) if "=" in question else None
    )
    tree.resolve(resolution.layers)
    info = describe_symbol(item)
    bounds = range_text(item) if isinstance(item, Symbol) else ""
    return {
        "symbol": name,
        "type": info.type,
        "value": typed_value(item),
        "origin": _symbol_origin(resolution, item),
        "prompt": info.prompt,
        "default": tree.default(item),
        "range": bounds or None,
        "available": bool(item.visibility) or not is_settable(item),
        "needs": _needs(item) if is_settable(item) else [],
        "selected_by": selecting_symbols(item) if isinstance(item, Symbol) else [],
        "choice": info.choice or None,
        "members": _members(item) if isinstance(item, Choice) else [],
        "help": info.help,
        "defined": [f"{node.filename}:{node.linenr}" for node in item.nodes],
        "asked": trial,
    }


def format_explanation(explanation: dict[str, Any]) -> str:
    """Format the explanation for a terminal."""
    name, value, origin = explanation["symbol"], explanation["value"], explanation["origin"]
    shown = (
        f'"{kconfiglib.escape(value)}"'
        if explanation["type"] == "string"
        else to_kconfig_text(value)
    )
    rows = [
        ("from", f"{origin['where']} ({origin['label']})  {origin['assignment']}".rstrip()),
        ("prompt", explanation["prompt"] or "none: derived, cannot be set"),
        (
            "type",
            explanation["type"] + (f", {explanation['range']}" if explanation["range"] else ""),
        ),
        ("default", explanation["default"]),
        ("choice", explanation["choice"]),
        *(("member", _member_row(member)) for member in explanation["members"]),
        *(("needs", _need_row(need)) for need in explanation["needs"]),
        ("forced", ", ".join(explanation["selected_by"])),
        ("defined", ", ".join(explanation["defined"])),
    ]
    lines = [
        f"{name} = {shown}" if explanation["available"] else f"{name} = {shown} (not available)"
    ]
    lines += [f"    {title:8} {text}" for title, text in rows if text]
    if explanation["help"]:
        lines += ["", textwrap.indent(explanation["help"], "    ")]
    if explanation["asked"]:
        problems = explanation["asked"]["problems"]
        lines += ["", *(problems or [f"{explanation['asked']['assignment']} would take effect"])]
    return "\n".join(lines)


def _member_row(member: dict[str, Any]) -> str:
    state = "selected" if member["selected"] else "" if member["available"] else "not available"
    return f"{member['symbol']}  {member['prompt']}{f'  ({state})' if state else ''}"


def _need_row(need: dict[str, Any]) -> str:
    values = ", ".join(f"{name} is {value}" for name, value in need["now"].items())
    return f"{need['condition']}  ({'met' if need['met'] else 'unmet'}: {values})"


def _needs(item: Symbol | Choice) -> list[dict[str, Any]]:
    return [
        {
            "condition": condition_text(clause),
            "met": bool(kconfiglib.expr_value(clause)),
            "now": current_values(clause),
        }
        for clause in requirements(item)
    ]


def _members(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "symbol": member.name,
            "prompt": describe_symbol(member).prompt,
            "selected": member is choice.selection,
            "available": bool(member.visibility),
        }
        for member in choice.syms
    ]


def _symbol_origin(resolution: ResolvedConfig, item: Symbol | Choice) -> dict[str, str]:
    """Return the origin of the value; a choice member has the origin of its choice."""
    decider = item.choice or item if isinstance(item, Symbol) else item
    origin = resolution.origins[decider.name]
    if origin is None:
        where = describe_symbol(decider).where
        return {"label": "default", "where": where, "assignment": ""}
    text = f"{origin.name}={origin.value}"
    return {"label": origin.label, "where": origin.where, "assignment": text}


def _try(tree: KconfigTree, resolution: ResolvedConfig, layer: ConfigLayer) -> dict[str, Any]:
    assignment = "".join(f"{a.name}={a.value}" for a in layer.assignments)
    try:
        tree.resolve([*resolution.layers, layer])
    except ConfigError as error:
        return {"assignment": assignment, "problems": [p.what for p in error.problems]}
    return {"assignment": assignment, "problems": []}


# Read-only commands; each returns text or JSON for stdout.


def explain_symbol(
    place: ConfigWorkspace, sym: str, json: bool, layers: Sequence[ConfigLayer] = ()
) -> str:
    """Explain the value of NAME, or whether NAME=VALUE would take effect, with ``layers`` on top."""
    require_value(sym, "SYM", "make why SYM=NAME")
    tree = KconfigTree(place.root)
    explanation = explain_value(tree, resolve_config(tree, place.config, *layers), sym)
    return _document(explanation) if json else format_explanation(explanation)


def diff_config_files(place: ConfigWorkspace, a: str, b: str, json: bool) -> str:
    """Compare A with B, each a file or a NAME[+FRAGMENT…].

    An empty A is .config.old, an empty B is .config.
    """
    old = place.config.with_name(place.config.name + ".old")
    if not a and not old.exists():
        what = "no previous configuration to compare with"
        raise ConfigError(
            Problem(what, str(old), "type: make diffconfig A=NAME", code="config.missing")
        )
    result = diff_configs(
        _assignments(place, a or str(old)), _assignments(place, b or str(place.config))
    )
    return _document(asdict(result)) if json else format_diff(result)


def format_defconfigs(place: ConfigWorkspace, json: bool, columns: int | None = None) -> str:
    """List the defconfigs and fragments, each with its first comment line, within ``columns``."""
    bases, fragments = list_defconfigs(place.root)
    if json:
        fields = {"defconfigs": bases, "fragments": fragments}
        return _document({key: [_plain(d) for d in listed] for key, listed in fields.items()})
    width = max((len(d.name) for d in [*bases, *fragments]), default=0) + 2
    lines = ["make defconfig-NAME"]
    lines += [f"  {d.name:{width}}{d.summary}" for d in bases]
    lines += ["", "make defconfig-NAME+FRAGMENT+…"]
    lines += [f"  {d.name:{width}}{d.summary}{_bases_note(d)}" for d in fragments]
    return folded("\n".join(lines), columns, " " * (width + 2))


def _bases_note(fragment: Defconfig) -> str:
    if not fragment.bases:
        return ""
    return " [any]" if "*" in fragment.bases else f" [{', '.join(fragment.bases)}]"


def _plain(defconfig: Defconfig) -> dict[str, Any]:
    return {"name": defconfig.name, "summary": defconfig.summary, "bases": list(defconfig.bases)}


def _document(content: Mapping[str, Any]) -> str:
    document = {"schema_version": SCHEMA_VERSION, **content}
    return dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)


def _assignments(place: ConfigWorkspace, source: str) -> dict[str, str]:
    """Return values by name, strings in quotes; a file as written, a NAME[+FRAGMENT…] in full."""
    if "/" in source or source.startswith(".") or Path(source).exists():
        layer = read_file(Path(source), "config")
    else:
        tree = KconfigTree(place.root)
        text = tree.config_text(defconfig_layers(place.root, source))
        layer = parse_text(text, "config", source)
    if layer.problems:
        raise ConfigError(*layer.problems)
    return {a.name: f'"{escape(a.value)}"' if a.quoted else a.value for a in layer.assignments}
