"""Any table is rendered alike: aligned text, Markdown, CSV and JSON."""

import json

from lib.report.render import csv_table, json_document, markdown_table, shortened, text_lines

ROWS = [("step", "loss"), ("baseline", "3.5"), ("ra", "10.25")]


def test_columns_of_text_are_aligned_without_trailing_blanks() -> None:
    assert text_lines(ROWS) == ["step      loss", "baseline  3.5", "ra        10.25"]
    assert text_lines(ROWS, right=(1,)) == ["step       loss", "baseline    3.5", "ra        10.25"]
    assert text_lines([("a", "b")], min_width=3) == ["a    b"]
    assert text_lines([]) == []


def test_a_markdown_table_is_aligned_and_escaped() -> None:
    assert markdown_table(ROWS[0], ROWS[1:]) == (
        "| step     |  loss |\n| -------- | ----: |\n| baseline |   3.5 |\n| ra       | 10.25 |\n"
    )
    # "-:" is the shortest rule.
    assert markdown_table(("#", "x"), [("1", "a|b\nc")], left=(1,)) == (
        "|  # | x      |\n| -: | ------ |\n|  1 | a\\|b c |\n"
    )


def test_a_missing_figure_is_an_empty_csv_field() -> None:
    assert csv_table(["a", "b"], [[1.5, None]]) == "a,b\n1.5,\n"


def test_a_json_document_has_sorted_keys_and_the_version_of_its_schema() -> None:
    text = json_document(3, {"b": 1, "a": None})
    assert json.loads(text) == {"a": None, "b": 1, "schema_version": 3}
    assert text.index('"a"') < text.index('"b"') and text.endswith("}\n")


def test_a_long_title_is_cut_between_words():
    titles = ["MLP at 2.5 times attention", "both, share 20 %", "GPT-2"]
    assert shortened(titles, 10) == ["MLP at…", "both…", "GPT-2"]
    assert shortened(titles, 12) == ["MLP at 2.5…", "both, share…", "GPT-2"]
    assert shortened(["reciprocal"], 5) == ["reci…"]
