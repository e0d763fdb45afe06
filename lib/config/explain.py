"""Explanation of one symbol or choice: its value, the origin of the value, and its dependencies."""

import textwrap
from typing import Any

from kconfiglib import Choice, Symbol, escape, expr_value

from lib.config.check import (
    FIND_SYMBOL,
    condition_text,
    current_values,
    definition_location,
    is_settable,
    prompt_node,
    range_text,
    requirements,
    selecting_symbols,
)
from lib.config.layers import (
    ResolvedConfig,
    parse_command_line_settings,
    to_kconfig_text,
)
from lib.config.tree import KconfigTree, item_type, typed_value
from lib.errors import ConfigError, Problem


def explain_value(tree: KconfigTree, resolution: ResolvedConfig, question: str) -> dict[str, Any]:
    """Explain ``NAME`` as plain data; ``NAME=VALUE`` also tries the assignment.

    Raises ConfigError with the nearest names if there is no such symbol or choice.
    """
    name = question.partition("=")[0].removeprefix("CONFIG_")
    item = tree.find(name)
    if item is None:
        what, code = tree.unknown_symbol(name)
        raise ConfigError(Problem(f"{name}: {what}", "SYM", FIND_SYMBOL, code=code))
    asked = None
    if "=" in question:
        layer = parse_command_line_settings([question])
        asked = {"assignment": question.removeprefix("CONFIG_"), "problems": list[str]()}
        try:
            tree.resolve([*resolution.layers, layer])
        except ConfigError as error:
            asked["problems"] = [problem.what for problem in error.problems]
    tree.resolve(resolution.layers)
    settable, node = is_settable(item), prompt_node(item)
    is_choice = isinstance(item, Choice)
    choice = None if is_choice else item.choice
    members = item.syms if is_choice else ()
    return {
        "symbol": name,
        "type": item_type(item),
        "value": typed_value(item),
        # A choice member has the origin of its choice.
        "origin": _origin(resolution, choice or item),
        "prompt": node.prompt[0] if node.prompt else "",
        "default": tree.default(item),
        "range": None if is_choice else range_text(item) or None,
        "available": bool(item.visibility) or not settable,
        "needs": [
            {
                "condition": condition_text(clause),
                "met": bool(expr_value(clause)),
                "now": current_values(clause),
            }
            for clause in (requirements(item) if settable else ())
        ],
        "selected_by": [] if is_choice else selecting_symbols(item),
        "choice": choice.name if choice else None,
        "members": [
            {
                "symbol": member.name,
                "prompt": prompt_node(member).prompt[0],
                "selected": member is item.selection,
                "available": bool(member.visibility),
            }
            for member in members
        ],
        "help": (node.help or "").strip(),
        "defined": [f"{node.filename}:{node.linenr}" for node in item.nodes],
        "asked": asked,
    }


def _origin(resolution: ResolvedConfig, item: Symbol | Choice) -> dict[str, str]:
    origin = resolution.origins[item.name]
    if origin is None:
        return {"label": "default", "where": definition_location(item), "assignment": ""}
    text = f"{origin.name}={origin.value}"
    return {"label": origin.label, "where": origin.where, "assignment": text}


def format_explanation(explanation: dict[str, Any]) -> str:
    """Format the explanation for a terminal."""
    name, kind, origin = (explanation[key] for key in ("symbol", "type", "origin"))
    value = explanation["value"]
    shown = f'"{escape(value)}"' if kind == "string" else to_kconfig_text(value)
    rows = [
        ("from", f"{origin['where']} ({origin['label']})  {origin['assignment']}".rstrip()),
        ("prompt", explanation["prompt"] or "none: derived, cannot be set"),
        ("type", ", ".join(filter(None, (kind, explanation["range"])))),
        ("default", explanation["default"]),
        ("choice", explanation["choice"]),
    ]
    for member in explanation["members"]:
        state = "" if member["available"] else "  (not available)"
        state = "  (selected)" if member["selected"] else state
        rows.append(("member", f"{member['symbol']}  {member['prompt']}{state}"))
    for need in explanation["needs"]:
        values = ", ".join(f"{symbol} is {now}" for symbol, now in need["now"].items())
        met = "met" if need["met"] else "unmet"
        rows.append(("needs", f"{need['condition']}  ({met}: {values})"))
    rows.append(("forced", ", ".join(explanation["selected_by"])))
    rows.append(("defined", ", ".join(explanation["defined"])))
    lines = [f"{name} = {shown}" + " (not available)" * (not explanation["available"])]
    lines += [f"    {title:8} {text}" for title, text in rows if text]
    if explanation["help"]:
        lines += ["", textwrap.indent(explanation["help"], "    ")]
    if asked := explanation["asked"]:
        lines += ["", *(asked["problems"] or [f"{asked['assignment']} would take effect"])]
    return "\n".join(lines) + "\n"
