"""The help of make, and the completion script for shells."""

import shutil
import subprocess

import pytest

from lib.config.dotconfig import list_defconfigs
from lib.make_help import completion, help_text
from lib.project import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("make verd", {"verdicts"}),
        ("make plan STE", {"STEPS="}),
        ("make defconfig-gpt2-quickst", {"defconfig-gpt2-quickstart"}),
        ("make defconfig-gpt2-124m+qui", {"defconfig-gpt2-124m+quick"}),
        ("make check DEFCONFIG=gpt2-quickst", {"gpt2-quickstart"}),
        ("make why SYM=DROPO", {"DROPOUT"}),
        ("make audit RUNS=results/ratio/ra-s1", {"results/ratio/ra-s1-0a1b2c3d"}),
        ("make plan STEPS=r", set()),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_targets_variables_symbols_and_runs(tmp_path, shell, typed, expected):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/run_test_matrix.py").touch()
    (tmp_path / "results/ratio/ra-s1-0a1b2c3d").mkdir(parents=True)
    (tmp_path / ".config").write_text('CONFIG_DROPOUT="0.0"\n# CONFIG_COMPILE is not set\n')
    bases, fragments = list_defconfigs(ROOT)
    names = [*(d.name for d in bases), *(f"+{d.name}" for d in fragments)]
    (tmp_path / "script").write_text(completion(MAKEFILE, names))
    command = (
        f". ./script; COMP_LINE={typed!r} COMP_POINT={len(typed)}; _kablate_make 2> /dev/null; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([shell, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    replies = set(done.stdout.split())
    if shell == "zsh":
        # zsh selects among the replies itself, and replaces the whole word, not the part after "=".
        word = typed.split()[-1]
        head = word[: word.find("=") + 1]
        replies = {reply.removeprefix(head) for reply in replies if reply.startswith(word)}
    assert replies == expected, done.stderr


def test_help_puts_the_summary_into_the_run_group():
    text = help_text(["##@ Run\n", "all: data ## Train\n", "##: A=n  A value\n"], "57 runs")
    assert text.splitlines() == ["Run", "  57 runs", f"  {'all':22}Train", f"  {'A=n':22}A value"]


def test_the_help_of_the_makefile_has_two_columns_within_80_characters():
    lines = help_text(MAKEFILE.splitlines(), "summary").splitlines()
    entries = [line for line in lines if line.startswith("  ") and line != "  summary"]
    assert len(entries) > 80 and max(map(len, lines)) <= 80
    assert [line for line in entries if line[23] != " " or line[24] == " "] == []
