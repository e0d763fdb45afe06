"""The help of make, and the completion script for shells."""

import shutil
import subprocess

import pytest

from lib.commands import VARIABLES
from lib.config.dotconfig import list_defconfigs
from lib.make_help import completion, document, help_text
from lib.project import ROOT

COMPLETED = {
    "make verd": {"verdicts"},
    "make plan STE": {"STEPS="},
    "make defconfig-gpt2-quickst": {"defconfig-gpt2-quickstart"},
    "make defconfig-gpt2-124m+qui": {"defconfig-gpt2-124m+quick"},
    "make check DEFCONFIG=gpt2-quickst": {"gpt2-quickstart"},
    "make why SYM=DROPO": {"DROPOUT"},
    "make audit RUNS=results/ratio/ra-s1": {"results/ratio/ra-s1-0a1b2c3d"},
    "make plan STEPS=mla-golden-m": {"mla-golden-mech"},
    "make plan STEPS=0-3,mla-golden-m": {"0-3,mla-golden-mech"},
    "make check CHECKS=causal,dec": {"causal,declared", "causal,decode"},
    "make plan GPU=h": {"h100", "h200"},
    "make O=my why SYM=N_L": {"N_LAYER"},
    "make O=my audit RUNS=my/results/ratio/b": {"my/results/ratio/baseline-s1-0a1b2c3d"},
    "make plan SEEDS=": set(),
}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_targets_variables_symbols_and_runs(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for source in ("lib/kablate.py", "lib/env/gpu.py", "gpt2/check/__init__.py"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    shutil.copytree(ROOT / "gpt2/study/studies", tmp_path / "gpt2/study/studies")
    (tmp_path / "results/ratio/ra-s1-0a1b2c3d").mkdir(parents=True)
    (tmp_path / "my/results/ratio/baseline-s1-0a1b2c3d").mkdir(parents=True)
    (tmp_path / "my/.config").write_text("CONFIG_N_LAYER=4\n")
    (tmp_path / ".config").write_text('CONFIG_DROPOUT="0.0"\n# CONFIG_COMPILE is not set\n')
    bases, fragments = list_defconfigs(ROOT)
    names = [*(d.name for d in bases), *(f"+{d.name}" for d in fragments)]
    (tmp_path / "script").write_text(completion(names))
    commands = [". ./script"]
    for typed in COMPLETED:
        commands.append(f"COMP_LINE={typed!r} COMP_POINT={len(typed)}; _kablate_make 2> /dev/null")
        commands.append('printf "%s " "${COMPREPLY[@]}"; echo')
    words = [shell, "-c", "\n".join(commands)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    found = [set(line.split()) for line in done.stdout.splitlines()]
    if shell == "zsh":
        # zsh selects among the replies itself, and replaces the whole word, not the part after "=".
        for number, typed in enumerate(COMPLETED):
            word = typed.split()[-1]
            head = word[: word.find("=") + 1]
            found[number] = {r.removeprefix(head) for r in found[number] if r.startswith(word)}
    assert dict(zip(COMPLETED, found, strict=True)) == COMPLETED, done.stderr


def test_the_help_fits_one_screen_of_60_lines_and_80_columns():
    summarized = help_text("57 runs").splitlines()
    assert summarized[summarized.index("Run") + 1] == "  57 runs"
    text = help_text()
    assert text.count("\n") <= 60 and "No .config yet" in text
    every = help_text(every=True)
    assert [name for name in VARIABLES if name.isupper() and f"{name}=" not in every] == []
    for lines in (text.splitlines(), every.splitlines()):
        assert max(map(len, lines)) <= 80
        entries = [x for x in lines if x.startswith("  ") and "No .config yet" not in x]
        # Two columns.
        assert [x for x in entries if x[23] != " " or x[24] == " "] == []


def test_the_document_has_the_table_of_the_variables():
    """python -m lib.make_help --document writes it."""
    assert document() in (ROOT / "docs/configuration.md").read_text()
