"""Web pages of fabricated studies, parsed: elements, text, and the cells of tables by heading."""

from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from lib.report.page import report_page
from lib.report.plots import study_series
from lib.report.study import JudgedStudy
from tests.lib.report.documents import document_of

CONTEXT: Mapping[str, Any] = {
    "title": "Study demo",
    "question": ["Planned: models."],
    "flops": {"baseline": 6e6, "step-1": 7e6, "step-2": 6e6},
    "settings": [["MAX_ITERS", "120", "defconfig"]],
}
_VOID = {"meta", "path", "rect", "br"}


def page_of(table: JudgedStudy, context: Mapping[str, Any] = CONTEXT) -> str:
    return report_page(document_of(table, **context), study_series(table))


class Parsed(HTMLParser):
    """Elements, attributes, text and tables of a page; unbalanced elements are a failure.

    ``tables`` maps the heading above each table to its rows, each of which maps the headings of the
    columns to text. The parts that open on a tap are in ``sources``, not in the cells.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.sources: dict[str, str] = {}
        self.words: list[str] = []
        self.title = ""
        self._heads: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert self.tags.count("script") == self.tags.count("style") == 1

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(name, attributes)
        if name == "thead":
            self._heads, self.tables[self.title] = [], []
        elif name == "th":
            self._heads.append("")
        elif name == "tr" and "tbody" in dict(self.open):
            self.tables[self.title].append({})
        elif name == "td":
            row = self.tables[self.title][-1]
            row[self._heads[len(row)]] = ""
        elif name in ("h2", "h3", "summary"):
            self.title = ""
        if name not in _VOID:
            self.open.append((name, dict(attributes)))

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes += attributes

    def handle_endtag(self, name: str) -> None:
        if name not in _VOID:
            assert self.open.pop()[0] == name

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        inside = dict(self.open)
        popover = next((a["id"] for _, a in self.open if "popover" in a), None)
        if popover:
            self.sources[popover] = self.sources.get(popover, "") + data
        elif "th" in inside:
            self._heads[-1] += data
        elif "td" in inside:
            row = self.tables[self.title][-1]
            heading, cell = list(row)[-1], inside["td"]
            assert cell.get("data-label", heading) == heading
            row[heading] += data.strip("\n")
            if "word" in str(cell.get("class")).split() and self.title == "Verdicts":
                self.words.append(data)
        elif {"h2", "h3", "summary"} & inside.keys():
            self.title += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def answer(self) -> str:
        after = self.texts[self.texts.index("Answer") + 1 :]
        return next(text.strip() for text in after if text.strip())

    def values(self, name: str) -> list[str | None]:
        return [value for key, value in self.attributes if key == name]
