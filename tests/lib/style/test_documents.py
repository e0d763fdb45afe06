"""Tests of the document check: wrong names are found, correct names are accepted."""

from pathlib import Path

import pytest

from lib.project import ROOT
from lib.style import check
from lib.style.check import KnownNames, known_names, run_directory_names

KNOWN = KnownNames(
    targets={"all", "plan", "why"},
    configurations={"gpt2-124m", "cpu"},
    names={"STEPS", "SYM", "SET", "N_LAYER", "O"},
    paths={"lib/config/field.py", "binding.py", "gpt2", "status.json"},
    written={"results", ".config"},
)


def problems(text):
    """Return location, code and last word of each problem."""
    found = check.check_names(Path("README.md"), text, KNOWN)
    return [(p.where, p.code, p.what.split(" ")[-1]) for p in found]


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("`make paln`", "unknown-target", "paln"),
        ("`make && make paln`", "unknown-target", "paln"),
        ("```\nmake plan STEP=3\n```", "unknown-variable", "STEP"),
        ("`make defconfig-gpt2-124m+gpu`", "unknown-target", "defconfig-gpt2-124m+gpu"),
        ('`make all SET="N_LAYERS=4"`', "unknown-symbol", "N_LAYERS"),
        ("`CONFIG_N_LAYERS`", "unknown-symbol", "N_LAYERS"),
        ("`lib/bindings.py`", "unknown-path", "lib/bindings.py"),
        ("see `lib/nothing/`", "unknown-path", "lib/nothing/"),
    ],
)
def test_a_wrong_name_is_found(text, code, name):
    where = f"README.md:{2 if '```' in text else 1}"
    assert problems(text) == [(where, f"style.{code}", name)]


@pytest.mark.parametrize(
    "text",
    [
        "make up your mind about N_LAYERS in lib/bindings.py: this is prose",
        "`make`, `make -j4 plan`, `make plan STEPS=0-3,ra O=/tmp/x`, `make defconfig-gpt2-124m+cpu`",
        "`make defconfig-NAME+FRAGMENT` and `results/<study>/x.json` and `tests/*.py`",
        '```\nmake plan   what would run\nmake defconfig-gpt2-124m \\\n    SET="N_LAYER=4"\n```',
        '```\nmake defconfig-gpt2-124m SET="N_LAYER=4 \\\n    N_LAYER=4 \\\n    N_LAYER=4"\n```',
        "`N_LAYER`, `CONFIG_N_LAYER=4`, `q_BNTH`, `lib/config/field.py`, `gpt2/`, `status.json`",
        "`results/ratio/table.md`, `.config`, `/abs/file.py`",
    ],
)
def test_the_truth_is_left_alone(text):
    assert problems(text) == []


def test_lines_are_counted_through_continued_commands():
    text = "\n```\nmake plan \\\n  STEPS=1\nmake paln\n```\n"
    assert problems(text) == [("README.md:5", "style.unknown-target", "paln")]


def test_what_the_makefile_offers():
    text = "A := 1\nSETTINGS := V O\nSETTINGS += STEPS\nall: data ## x\n\tall: y\nlist-x:\n%: ;\n"
    assert check.makefile_targets(text) == {"all", "list-x"}
    assert check.makefile_variables(text) == {"V", "O", "STEPS"}


def test_the_tree_knows_its_own_names():
    known = known_names(ROOT)
    assert {"all", "plan", "mrproper"} <= known.targets
    assert {"gpt2-quickstart", "quick"} <= known.configurations
    assert {"JOBS", "N_LAYER", "MODEL_SIZE_TINY", "OPTIMIZER"} <= known.names
    assert {"lib/style/check.py", "lib/style", "CODEX.md", "summary.json"} <= known.paths


def test_run_files_are_those_of_a_run_directory():
    assert {"status.json", "checkpoints", "per_query.csv"} <= run_directory_names()
