"""Explanation of one symbol or choice: its value, the origin of the value, and its dependencies."""

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
    """Explain ``NAME`` as plain data; ``NAME=VALUE`` also tries the assignment.

    Raises ConfigError with the nearest names if there is no such symbol or choice.
    """
    name = question.partition("=")[0].removeprefix("CONFIG_")
    item = tree.find(name)
    if item is None:
        what = f"{name}: no such symbol{tree.nearest(name)}"
        raise ConfigError(Problem(what, code="config.unknown-symbol"))
    trial = _try(tree, resolution, parse_set([question])) if "=" in question else None
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
        "asked": trial,
    }


def render_why(explanation: dict[str, Any]) -> str:
    """Format the explanation for a terminal."""
    name, value, origin = explanation["symbol"], explanation["value"], explanation["origin"]
    shown = f'"{kconfiglib.escape(value)}"' if explanation["type"] == "string" else as_text(value)
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
    """Return the origin of the value; a choice member has the origin of its choice."""
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
