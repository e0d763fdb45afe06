"""The result table on a terminal."""

import io
import re

import pytest

from lib.console import shown
from lib.report.columns import to_terminal, training_text
from lib.report.render import fitting_rows
from lib.report.study import JudgedStudy, read_study
from tests.lib.report.documents import document_of


@pytest.fixture
def table(make_run) -> JudgedStudy:
    """Return a table of three steps, of which one is better and one is unfinished."""
    runs = []
    for seed, loss in enumerate((3.0, 3.2, 3.1), 1):
        runs.append(make_run("base", loss, seed=seed))
        for number, (slug, gain) in enumerate((("wide", 0.1), ("golden-gate-cross", 0.0)), 1):
            noise = 0.001 * seed
            runs.append(
                make_run(slug, loss - gain + noise, seed=seed, parent="base", number=number)
            )
    runs.append(make_run("later", parent="base", number=3))
    stale = (runs[1], runs[4])
    return read_study("demo", runs, is_stale=lambda record: record.planned in stale)


@pytest.mark.parametrize("width", [80, 132])
def test_every_line_fits_and_the_table_is_first(table: JudgedStudy, width: int) -> None:
    text = shown(
        to_terminal(document_of(table, left_out=["x" * 40 + " is impossible"]), width), colour=False
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert not re.search(r"[|#]|\x1b", text)
    end = 1 + len(document_of(table, left_out=["x" * 40 + " is impossible"])["rows"])
    assert lines[0].startswith("step ") and lines[end] == ""
    assert "BETTER" in text and "2 golden-gate-cross" in text
    assert ("params" in lines[0]) == (width == 132)
    notes = "\n".join(lines[end:])
    assert "is impossible" in notes and notes.count("stale") == 1
    # The legend, and remarks on single comparisons, are in table.md.
    assert "Rule" not in notes and "normal model" not in notes


def test_colours_mark_the_verdict_and_the_best_row(table: JudgedStudy) -> None:
    plain = shown(
        to_terminal(document_of(table, left_out=["x" * 40 + " is impossible"]), 80), colour=False
    )
    text = shown(
        to_terminal(document_of(table, left_out=["x" * 40 + " is impossible"]), 80), colour=True
    )
    assert re.sub(r"\x1b\[[\d;]+m", "", text) == plain
    (best,) = (line for line in text.splitlines() if line.startswith("\x1b[1m"))
    assert "1 wide" in best and "\x1b[1;32mBETTER" in best and best.endswith("\x1b[0m")


SERIES = {
    # The loss before the first step has no place on a logarithmic scale.
    "evaluation": {"at": [0, 1000, 10_000, 100_000], "mean": [9.0, 5.5, 4.0, 2.5]},
    "sample": {
        "seed": 3,
        "text": "".join(f"line {i} \x1b[31m" + "x " * 60 + "\n" for i in range(9)),
    },
}


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", "█▅▁"), ("ascii", "@+_")])
def test_a_training_ends_with_its_curve_and_ten_lines_of_its_sample(
    monkeypatch: pytest.MonkeyPatch, encoding: str, blocks: str
) -> None:
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    curve, scale, heading, *sample = training_text(SERIES, 80).splitlines()
    top, middle, low = blocks
    # Each evaluation holds until the next one: half of a decade of two, and the last point.
    assert curve == f"val loss 5.5000 {top * 20}{middle * 19}{low} 2.5000"
    assert scale.split() == ["after", "1k", "to", "100k", "tokens,", "log", "scale"]
    assert heading == "Sample, seed 3:" and len(sample) == 10
    assert max(map(len, sample)) <= 80 and "\\x1b[31m" in sample[0] and "\x1b" not in sample[0]


def test_a_training_without_evaluations_or_sample_ends_with_nothing() -> None:
    assert training_text({"evaluation": None, "sample": None}, 80) == ""
    # 7 (61/7) is below 61 in floating point.
    two = {"evaluation": {"at": [7, 61], "mean": [2.0, 1.0]}, "sample": None}
    assert training_text(two, 80).splitlines()[0].endswith("█▁ 1.0000")
    one = {"evaluation": {"at": [0, 5], "mean": [2.0, 1.0]}, "sample": None}
    assert training_text(one, 80) == ""


def test_columns_are_chosen_by_their_importance() -> None:
    columns = {"a": ["1234"], "bb": ["1"], "c": ["12345678"]}

    def headings(width: int | None) -> str:
        shown, texts = fitting_rows(columns, ["c", "a", "bb"], width)
        assert list(texts) == [columns[heading][0] for heading in shown]
        return " ".join(shown)

    assert [headings(n) for n in (None, 14, 13, 3)] == ["a bb c", "a c", "bb c", "c"]


def test_a_title_is_cut_to_the_room_that_more_important_columns_leave() -> None:
    columns = {"title": ["a title of twenty-one"], "a": ["12345678"], "b": ["1"]}
    assert fitting_rows(columns, ["a", "title", "b"], 28)[1] == ("a title of…", "12345678", "1")
    assert fitting_rows(columns, ["a", "title", "b"], 32)[1] == (*columns["title"], "12345678")
    assert fitting_rows(columns, ["a", "title", "b"], None)[1][0] == columns["title"][0]
