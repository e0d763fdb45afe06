"""Every mechanism has a page that names its symbols, its costs and the steps that use it."""

import pytest

from gpt2.ablation.mechanisms import MECHANISMS as STUDY
from gpt2.attention import GATES, PATTERNS, PROJECTIONS, TERMS
from gpt2.mlp import MECHANISMS
from lib.kconfig import Tree
from lib.project import ROOT

PARTS = [*PROJECTIONS, *PATTERNS, *TERMS, *GATES, *MECHANISMS]


@pytest.fixture(scope="module")
def folders() -> dict[str, str]:
    """Symbol → the folder of the Kconfig file that has its prompt."""
    return {s.name: s.where.split("/Kconfig")[0].split("/")[-1] for s in Tree().symbols()}


@pytest.mark.parametrize("part", PARTS)
def test_a_page_names_symbols_costs_and_what_off_means(folders, part):
    text = (ROOT / "docs" / "mechanisms" / f"{part}.md").read_text()
    assert text.startswith(f"# {part}: ")
    # The members of a choice are named by its own name and by what they are.
    symbols = {s.name for s in Tree().symbols() if folders[s.name] == part and not s.choice}
    assert not {name for name in symbols if name not in text}
    for row in ("parameters", "computed", "off", "decoding"):
        assert f"\n| {row}" in text, row


def test_a_page_names_the_steps_of_its_options(folders):
    for step in STUDY.steps:
        for part in {folders[name] for name in step.set} & set(PARTS):
            text = (ROOT / "docs" / "mechanisms" / f"{part}.md").read_text()
            assert f"`{step.slug}`" in text, (part, step.slug)
