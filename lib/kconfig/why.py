"""Explains one symbol or choice: its value, where that came from, and what it depends on."""

import textwrap
from typing import Any

import kconfiglib
from kconfiglib import Choice, Symbol

from lib.errors import ConfigError, Problem
from lib.kconfig.check import has_prompt
from lib.kconfig.describe import describe_item, typed_value
from lib.kconfig.expressions import condition, current, range_text, requirements, selectors
from lib.kconfig.layers import Layer, Resolution, as_text
from lib.kconfig.parse import parse_set
from lib.kconfig.tree import Tree


def why(tree: Tree, resolution: Resolution, question: str) -> dict[str, Any]:
    """The explanation of ``NAME`` as plain data; ``NAME=VALUE`` also asks whether that would take.

    Raises ConfigError with the nearest names when there is no such symbol or choice.
    """
    name = question.partition("=")[0].removeprefix("CONFIG_")
    item = tree.find(name)
    if item is None:
        raise ConfigError(Problem(f"{name}: no such symbol{tree.nearest(name)}"))
    asked = _try(tree, resolution, parse_set([question])) if "=" in question else None
    tree.resolve(resolution.layers)
    info = describe_item(item)
    bounds = range_text(item) if isinstance(item, Symbol) else ""
    return {
        "symbol": name,
        "type": info.type,
        "value": typed_value(item),
        "origin": _origin(resolution, item),
        "prompt": info.prompt,
        "default": tree.default(item),
        "range": bounds or None,
        "available": bool(item.visibility) or not has_prompt(item),
        "needs": _needs(item) if has_prompt(item) else [],
        "selected_by": selectors(item) if isinstance(item, Symbol) else [],
        "choice": info.choice or None,
        "members": _members(item) if isinstance(item, Choice) else [],
        "help": info.help,
        "defined": [f"{node.filename}:{node.linenr}" for node in item.nodes],
        "asked": asked,
    }


def render_why(found: dict[str, Any]) -> str:
    """The explanation for a terminal."""
    name, value, origin = found["symbol"], found["value"], found["origin"]
    shown = f'"{kconfiglib.escape(value)}"' if found["type"] == "string" else as_text(value)
    rows = [
        ("from", f"{origin['where']} ({origin['label']})  {origin['assignment']}".rstrip()),
        ("prompt", found["prompt"] or "none: derived from others, cannot be set"),
        ("type", found["type"] + (f", {found['range']}" if found["range"] else "")),
        ("default", found["default"]),
        ("choice", found["choice"]),
        *(("member", _member_row(member)) for member in found["members"]),
        *(("needs", _need_row(need)) for need in found["needs"]),
        ("forced", ", ".join(found["selected_by"])),
        ("defined", ", ".join(found["defined"])),
    ]
    lines = [f"{name} = {shown}" if found["available"] else f"{name} = {shown} (not available)"]
    lines += [f"    {title:8} {text}" for title, text in rows if text]
    if found["help"]:
        lines += ["", textwrap.indent(found["help"], "    ")]
    if found["asked"]:
        problems = found["asked"]["problems"]
        lines += ["", *(problems or [f"{found['asked']['assignment']} would take effect"])]
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
            "condition": condition(clause),
            "met": bool(kconfiglib.expr_value(clause)),
            "now": current(clause),
        }
        for clause in requirements(item)
    ]


def _members(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "symbol": member.name,
            "prompt": describe_item(member).prompt,
            "selected": member is choice.selection,
            "available": bool(member.visibility),
        }
        for member in choice.syms
    ]


def _origin(resolution: Resolution, item: Symbol | Choice) -> dict[str, str]:
    """Where the value is from; a choice member's value is decided where its choice's is."""
    decider = item.choice or item if isinstance(item, Symbol) else item
    origin = resolution.origins[decider.name]
    if origin is None:
        where = describe_item(decider).where
        return {"label": "default", "where": where, "assignment": ""}
    text = f"{origin.name}={origin.value}"
    return {"label": origin.label, "where": origin.where, "assignment": text}


def _try(tree: Tree, resolution: Resolution, layer: Layer) -> dict[str, Any]:
    assignment = "".join(f"{a.name}={a.value}" for a in layer.assignments)
    try:
        tree.resolve([*resolution.layers, layer])
    except ConfigError as error:
        return {"assignment": assignment, "problems": [p.what for p in error.problems]}
    return {"assignment": assignment, "problems": []}
