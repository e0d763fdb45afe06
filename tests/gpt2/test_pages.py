"""Every mechanism has a page that names its symbols, its costs and the steps that use it."""

import re
from pathlib import Path

import pytest
from kconfiglib import Choice

from gpt2.attention.config import REGISTRIES
from gpt2.mlp.options import MECHANISMS
from gpt2.nsa.options import NsaOptions
from gpt2.study.study_file import STUDIES
from lib.config.check import definition_location
from lib.config.tree import KconfigTree
from lib.project import ROOT
from tests.gpt2.builders import PARTS as PARTS_OF_MODELS

PARTS = [name for registry in (*REGISTRIES, MECHANISMS) for name in registry]


@pytest.fixture(scope="module")
def folders():
    """Symbol → the part of the Kconfig file that has its prompt: its ending, or its folder."""
    files = {s.name: Path(definition_location(s).split(":")[0]) for s in KconfigTree().symbols()}
    return {name: file.suffix[1:] or file.parent.name for name, file in files.items()}


@pytest.mark.parametrize("part", PARTS)
def test_a_page_names_symbols_costs_and_what_off_means(folders, part):
    text = (ROOT / "docs" / "mechanisms" / f"{part}.md").read_text()
    assert text.startswith(f"# {part}: ")
    # The members of a choice are named by its own name and by what they are.
    items = KconfigTree().symbols()
    symbols = {s.name for s in items if isinstance(s, Choice) or s.choice is None}
    symbols = {name for name in symbols if folders[name] == part}
    assert not {name for name in symbols if name not in text}
    for row in ("parameters", "implementation", "off", "decoding"):
        assert f"\n| {row}" in text, row


@pytest.mark.parametrize("study", ["mechanisms", "nsa"])
def test_a_page_names_the_steps_of_its_options(folders, study):
    for step in STUDIES[study].steps:
        for part in {folders[name] for name in step.set} & set(PARTS):
            text = (ROOT / "docs" / "mechanisms" / f"{part}.md").read_text()
            assert f"`{step.slug}`" in text, (part, step.slug)


def test_the_costs_on_the_page_of_nsa_are_those_declared():
    text = (ROOT / "docs" / "mechanisms" / "nsa.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    sizes = [(32, 16, 64, 16, 512), (32, 16, 64, 8, 256), (16, 8, 32, 8, 128)]
    named = [dict(zip(("compress", "stride", "select", "count", "window"), s)) for s in sizes]
    forms = [NsaOptions(**(PARTS_OF_MODELS["nsa"] | given)) for given in named]
    assert [int(length) for length, _ in rows] == [2**i for i in range(9, 17)]
    for length, found in ((int(n), cells.split(" | ")) for n, cells in rows):
        pairs = [round(p / length) for p in forms[0].pairs(length)]
        ratios = [f"{(length + 1) / 2 / form.mean_keys(length):.2f}" for form in forms]
        reads = sum(forms[0].pairs(length)) - sum(forms[0].pairs(length - 1))
        expected = [", ".join(map(str, pairs)), *ratios, str(reads), f"{length / reads:.2f}"]
        assert found == expected, length
