"""Descriptions of every symbol and choice that a user can set."""

from dataclasses import dataclass

from kconfiglib import BOOL, TYPE_TO_STR, Choice, Kconfig, Symbol

from lib.kconfig.check import definition, has_prompt


@dataclass(frozen=True)
class SymbolInfo:
    """One symbol with a prompt, or one choice (``type`` "choice", with its ``members``)."""

    name: str
    # bool, int, string or choice.
    type: str
    prompt: str
    help: str
    # Lower and upper bound as written (numbers or symbol names), None without a range.
    range: tuple[str, str] | None
    # Whether Kconfig declares a default; a bool without one defaults to n.
    has_default: bool
    # file:line of the definition that carries the prompt.
    where: str
    # Name of the choice that contains the symbol, or "".
    choice: str
    members: tuple[str, ...] = ()


def describe(kconf: Kconfig) -> list[SymbolInfo]:
    """Return every choice and every symbol with a prompt, in the order of the Kconfig files."""
    choices = [describe_item(choice) for choice in kconf.unique_choices]
    return choices + [describe_item(s) for s in kconf.unique_defined_syms if has_prompt(s)]


def describe_item(item: Symbol | Choice) -> SymbolInfo:
    """Return the static description of a symbol or choice; a missing prompt or help is ""."""
    is_choice = isinstance(item, Choice)
    bounds = [] if is_choice else item.ranges
    node = next((n for n in item.nodes if n.prompt), item.nodes[0])
    return SymbolInfo(
        name=item.name,
        type="choice" if is_choice else TYPE_TO_STR[item.orig_type],
        prompt=node.prompt[0] if node.prompt else "",
        help=(node.help or "").strip(),
        range=(bounds[0][0].name, bounds[0][1].name) if bounds else None,
        has_default=bool(item.defaults),
        where=definition(item),
        choice="" if is_choice or item.choice is None else item.choice.name,
        members=tuple(member.name for member in item.syms) if is_choice else (),
    )


def value_text(item: Symbol | Choice) -> str:
    """Return the value as text; a choice's value is its member in lower case, without CHOICE_."""
    if isinstance(item, Symbol):
        return str(item.str_value)
    if item.selection is None:
        return ""
    return str(item.selection.name.removeprefix(f"{item.name}_").lower())


def typed_value(item: Symbol | Choice) -> bool | int | str:
    """Return the value with its Python type; an unavailable int is 0."""
    text = value_text(item)
    if isinstance(item, Choice):
        return text
    if item.orig_type is BOOL:
        return text == "y"
    return int(text or 0) if TYPE_TO_STR[item.orig_type] == "int" else text
