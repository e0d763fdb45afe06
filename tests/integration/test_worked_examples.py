"""The worked examples of the documents run as written in a fresh clone."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.tree import git
from tests.make_command import ACTIVE
from tests.source import MAKE_VARIABLES

# Contexts of nsa-perf, times forms of ranges.
PERF_CELLS = 9
# Of make style, what takes less than a minute.
STYLE = (
    "for tool in 'black --check gpt2 tests/gpt2' 'ruff check'; do .venv/bin/python -m $tool; done"
)

# A bold file name followed by a code block, or a code block alone.
BLOCK = re.compile(r"(?:^\*\*(\S+)\*\*\n\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def clone(committed, tmp_path, server) -> Path:
    """Return a repository with the current files of this tree, and the interpreter of the tests."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(committed), "clone")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(server.interpreter())
    return folder


def follow(clone: Path, page: str) -> str:
    """Write the files, apply the patches and run the commands of a page; return the output."""
    printed = ""
    for name, language, text in BLOCK.findall((clone / page).read_text()):
        if name:
            path = clone / name.replace("\\", "")
            assert not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif language == "diff":
            git(clone, "apply", "-p0", "--recount", "--unidiff-zero", given=text)
        elif language == "sh":
            printed += _type(clone, text)
    return printed


def _type(clone: Path, commands: str) -> str:
    unset = {*ACTIVE, "MAKEFLAGS", "MAKELEVEL", "MFLAGS", *MAKE_VARIABLES}
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace("make style", STYLE)],
        cwd=clone,
        env={**{k: v for k, v in os.environ.items() if k not in unset}, "PYTHONPATH": str(clone)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def changed(clone: Path) -> set[str]:
    """Return the changed and new files."""
    lines = git(clone, "status", "--porcelain", "--untracked-files=all").splitlines()
    return {line[3:] for line in lines}


@pytest.mark.slow
def test_a_mechanism_is_a_file_five_entries_a_test_and_a_page(clone):
    printed = follow(clone, "docs/add-a-mechanism.md")
    assert changed(clone) == {
        *(f"gpt2/attention/{name}" for name in ("Kconfig", "Kconfig.alibi", "alibi.py")),
        *(f"gpt2/attention/{name}.py" for name in ("attention", "config", "options", "reference")),
        "tests/gpt2/attention/test_alibi.py",
        "docs/mechanisms/alibi.md",
    }
    assert git(clone, "diff", "--numstat").splitlines() == [
        "1\t0\tgpt2/attention/Kconfig",
        "3\t0\tgpt2/attention/attention.py",
        "2\t1\tgpt2/attention/config.py",
        "12\t0\tgpt2/attention/options.py",
        "3\t0\tgpt2/attention/reference.py",
    ]
    # Planned, and checked.
    assert "single/run" in printed and re.search(
        r"^[0-9]+ passed, 0 failed$", printed, re.MULTILINE
    )
    assert "CONFIG_ALIBI=y" in (clone / ".config").read_text()


@pytest.mark.slow
def test_a_study_is_a_file(clone):
    printed = follow(clone, "docs/own-study.md")
    assert changed(clone) == {"study.toml"}
    assert re.search(r"heads/03-two-heads-rope s3 .*768,256", printed)
    assert re.search(r"^[0-9]+ passed, 0 failed$", printed, re.MULTILINE)
    table = (clone / "results" / "heads" / "table.md").read_text()
    assert "two-heads-rope" in table and "not started" not in table


@pytest.mark.long
def test_a_long_run_is_a_page_of_commands(clone):
    printed = follow(clone, "docs/nsa-runbook.md")
    assert re.search(
        r"^RUN     978k parameters, .* grouped nsa, learned positions, bf16 on cpu, 120 it",
        printed,
        re.M,
    )
    assert re.search("query-key pairs.*: 1.15", printed)
    log = (clone / "nsa.log").read_text()
    assert "STOP" in log and "DONE" not in log
    run = next((clone / "nsa_125m_production" / "single").glob("run-s1-*"))
    assert re.search(r"(FIRST|WARN) +first 30 it", (run / "logs.txt").read_text())
    assert "resumes at iteration" in (run / "logs.txt").read_text()
    assert re.search(r"^VALID ", printed, re.MULTILINE)
    table = (clone / "nsa_perf" / "matrix" / "table.md").read_text()
    cells = re.findall(r"^\| \S+ s1 .*", table.split("## Speed")[1], re.MULTILINE)
    assert len(cells) == PERF_CELLS
    assert all("nsa" in cell for cell in cells)
