"""Training with uncommitted code from the command line, in a clone of this tree."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.files import sha256_file
from lib.project import ROOT
from tests.command_server import CommandServer
from tests.integration.conftest import IN_PROCESS, SINGLE
from tests.integration.tree import commit_copy, git


@pytest.fixture
def clone(build: Callable, tmp_path: Path) -> Path:
    """Return a repository with the files of this tree committed, a configuration and data."""
    folder = tmp_path / "clone"
    commit_copy(folder)
    build(**SINGLE)
    for name in (".config", "config.py", "data", "text"):
        (tmp_path / name).rename(folder / name)
    return folder


def command(
    clone: Path, script: str, *words: str, server: CommandServer | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run a script of the clone from another repository with a ``lib``, with or without the server.

    Returns the exit code, stdout and stderr.
    """
    elsewhere = clone.parent / "elsewhere"
    git(ROOT, "init", "-q", str(elsewhere))
    (elsewhere / "lib").mkdir(exist_ok=True)
    (elsewhere / "lib" / "__init__.py").write_text('raise SystemExit("another lib")\n')
    environment = {k: v for k, v in os.environ.items() if k != "ALLOW_DIRTY"}
    environment |= variables | {"PYTHONPATH": str(clone)}
    arguments = [str(clone / script), "-O", str(clone), *words]
    if server is not None:
        return server.run(arguments, environment, clone.parent, elsewhere)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_uncommitted_code_requires_a_flag_and_is_recorded(clone, tmp_path, server):
    model = clone / "gpt2" / "model.py"
    model.write_text(model.read_text() + "# Edited.\n")
    code, _, said = command(clone, *IN_PROCESS, server=server)
    assert (code, said.count("\n")) == (3, 3), said
    assert said.startswith("ERROR   ") and "gpt2/model.py" in said
    assert "[code.uncommitted]" in said and "ALLOW_DIRTY=y" in said
    assert not (clone / "results").exists()

    # Through a worker, too, whose server is an interpreter of its own.
    code, _, said = command(clone, "scripts/run_test_matrix.py", ALLOW_DIRTY="y")
    assert code == 0, said
    assert re.search("^DIRTY .*gpt2/model.py", said, re.MULTILINE)
    # Files written by training are ignored; texts are data, with a separate digest.
    assert set(git(clone, "status", "--porcelain").splitlines()) == {" M gpt2/model.py", "?? text/"}
    (run,) = (clone / "results" / "single").glob("run-*")
    manifest = json.loads((run / "manifest.json").read_text())
    # The recorded tree is the one that trains, not the repository of the working directory.
    assert manifest["volatile"]["git_root"] == str(clone)
    assert manifest["code"]["git_sha"] == git(clone, "rev-parse", "HEAD").strip()
    assert manifest["code"]["dirty_tree"] is True
    assert manifest["code"]["diff"] == {
        "file": "code.diff",
        "sha256": sha256_file(run / "code.diff"),
    }
    environment = manifest["environment"]
    assert environment["policy"] == "any" and environment["name"] == Path(sys.prefix).name
    kept = {name: sha256_file(run / "environment" / name) for name in environment["snapshot"]}
    assert environment["snapshot"] == kept and "packages.txt" in kept

    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(clone), str(again))
    git(again, "checkout", "-q", manifest["code"]["git_sha"])
    git(again, "apply", str(run / "code.diff"))
    assert (
        sha256_file(again / "gpt2" / "model.py") == manifest["origin"]["sources"]["gpt2/model.py"]
    )

    git(clone, "commit", "-qam", "edited")
    code, text, said = command(clone, "scripts/preflight_env.py", "--json", server=server)
    told = json.loads(text)
    assert (code, told["passed"], told["facts"]["dirty_tree"]) == (0, True, False), said
