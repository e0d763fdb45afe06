"""Steps and studies: lineage and selection."""

import pytest

from gpt2.study.step import Step, Study
from tests.errors import error_of


@pytest.fixture
def study() -> Study:
    return Study(
        "demo",
        (
            Step("baseline", "the start"),
            Step("ra", "one", "baseline", {"A": True}),
            Step("ra-wide", "two", "ra", {"B": True}),
            Step("deep", "three", "baseline", {"C": True}),
        ),
    )


def _slugs(steps):
    return [step.slug for step in steps]


def test_lineage_goes_from_the_baseline_to_the_step(study):
    assert _slugs(study.lineage(study.steps[2])) == ["baseline", "ra", "ra-wide"]
    assert study.label(study.steps[2]) == "demo/02-ra-wide"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", ["baseline", "ra", "ra-wide", "deep"]),
        ("2", ["ra-wide"]),
        ("0-1,deep", ["baseline", "ra", "deep"]),
        # In the study's order, whatever the order of the words, and once each.
        ("deep,0,ra,1", ["baseline", "ra", "deep"]),
        # A slug is that step alone; a pattern is all that it matches.
        ("ra", ["ra"]),
        ("ra*", ["ra", "ra-wide"]),
        ("ra-wide 3", ["ra-wide", "deep"]),
    ],
)
def test_selects_numbers_ranges_slugs_and_patterns(study, text, expected):
    assert _slugs(study.select(text)) == expected


def test_an_unknown_step_lists_the_nearest_slugs(study):
    error = error_of(study.select, "ra-wyde,9,2-4,1")
    text = str(error)
    assert error.codes == ["usage.unknown-step"] * 3
    assert "'ra-wyde'" in text and "nearest: ra-wide" in text
    assert "'9'" in text and "'2-4'" in text and "0-3" in text
    assert "'1'" not in text


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_selection_is_refused(study, text):
    assert error_of(study.select, text).codes == ["usage.missing-argument"]
