"""Elements of a self-contained web page: escaped by construction, without any network access.

Text is escaped unless it is an ``Html``, and only this module makes an ``Html`` of text: values of a
run directory, which may come from a stranger, cannot become markup. The content security policy
allows no request and no script except the page's own.
"""

import base64
import hashlib
import html
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.report.figures import NamedFigure, svg_element

_HERE = Path(__file__).parent
# Characters that no document may contain, and that could hide or reorder text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPECIAL = re.compile(f"{_CONTROL.pattern}|[<>&\"']")
_VOID = {"meta"}


class Html(str):
    """Markup: text that needs no escaping."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Return ``text`` as markup; control characters become U+FFFD."""
    if isinstance(text, Html):
        return text
    # The cells of a large study are plain.
    if not _SPECIAL.search(text):
        return Html(text)
    return Html(html.escape(_CONTROL.sub("\ufffd", text), quote=True))


def tag(element: str, /, *content: str, **attributes: str | None) -> Html:
    """Return an element. ``class_`` is the attribute class, ``data_word`` is data-word.

    An attribute that is None is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _VOID:
        return Html(f"<{element}{shown}>")
    return Html(f"<{element}{shown}>{joined(content)}</{element}>")


def joined(parts: Iterable[str], separator: str = "") -> Html:
    """Return the parts, escaped, in a row."""
    return Html(escape(separator).join(escape(part) for part in parts))


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its content, and the number that it is sorted by."""

    content: str
    value: float | None = None
    # Shown if the pointer rests on the cell.
    title: str = ""
    style: str = ""
    class_: str = ""
    word: str = ""


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    *,
    left: Collection[int] = (0,),
    class_: str = "",
    ids: Sequence[str] = (),
) -> Html:
    """Return a table that scrolls by itself if it is wide; a reader can sort it by any column.

    The columns ``left`` are aligned left, the others right, like numbers. ``ids`` are those of the
    rows.
    """
    sides = ["left" if i in left else "right" for i in range(len(header))]
    head = joined(
        tag("th", title, class_=side, scope="col")
        for title, side in zip(header, sides, strict=True)
    )
    lines = []
    for i, row in enumerate(rows):
        cells = joined(_cell(cell, side) for cell, side in zip(row, sides, strict=True))
        lines.append(tag("tr", cells, id=ids[i] if ids else None))
    body = tag("thead", tag("tr", head)) + tag("tbody", joined(lines))
    return tag(
        "div", tag("table", Html(body), class_="sortable"), class_=f"scroll {class_}".strip()
    )


def _cell(cell: Cell | str, side: str) -> Html:
    if isinstance(cell, str):
        # Most cells of a large study.
        return Html(f'<td class="{side}">{escape(cell)}</td>')
    return tag(
        "td",
        cell.content,
        class_=f"{side} {cell.class_}".strip(),
        title=cell.title or None,
        style=cell.style or None,
        data_v=None if cell.value is None else repr(float(cell.value)),
        data_word=cell.word or None,
    )


def figure_element(figure: NamedFigure) -> Html:
    """Return a figure with its caption; the title is its text for screen readers."""
    picture = Html(svg_element(figure))
    image = tag("div", picture, class_="picture", role="img", aria_label=figure.title)
    caption = tag("figcaption", figure.caption) if figure.caption else ""
    return tag("figure", image, caption, class_=figure.group)


def details(summary: str, *content: str) -> Html:
    """Return a part that a reader opens."""
    return tag("details", tag("summary", summary), *content)


def page(title: str, body: str) -> str:
    """Return the complete document."""
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            Html(f"<style>{style}</style>"),
        ]
    )
    script_element = Html(f"<script>{script}</script>")
    root = tag("html", tag("head", head), tag("body", body, script_element), lang="en")
    return f"<!doctype html>\n{root}\n"
