"""Uncommitted code, and the reproduction of a run in a fresh clone from its directory and the data."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpt2.study.plan import config_layers, make_plan
from lib.files import sha256_file
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.command_server import CommandServer
from tests.integration.conftest import SINGLE, SMALL, set_up
from tests.integration.tree import git

# A line of the trainer, and an edit that changes a training from its second step on.
LINE = "    measured = optimizer_step(session, micro_batches, lr)\n"
EDIT = "    measured = optimizer_step(session, micro_batches, lr * 1.01)\n"


@dataclass
class Clone:
    """A copy of the tree under git."""

    path: Path
    server: CommandServer
    scratch: Path

    def command(self, name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run a command of this tree; return exit code, stdout and stderr."""
        unset = ("V", "JSON", "STEPS", "RUN", "DATA", "FORCE", "ALLOW_DIRTY")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        given = {"PYTHONPATH": str(self.path), **variables}
        command = ["-m", "lib.kablate", name, *arguments]
        return self.server.run(command, environment | given, self.scratch, self.path)

    def clone(self, folder: Path) -> "Clone":
        git(folder, "clone", "-q", str(self.path), "clone")
        return replace(self, path=folder / "clone")

    def edit(self) -> None:
        trainer = self.path / "gpt2" / "training" / "loop.py"
        assert LINE in trainer.read_text()
        trainer.write_text(trainer.read_text().replace(LINE, EDIT))

    def reproduce(self, run: Path, data: Path, *more: str, dirty: str = "") -> tuple[int, str, str]:
        words = ("--run", str(run), "--data", str(data), *more)
        return self.command("reproduce", *words, ALLOW_DIRTY=dirty)


@pytest.fixture(scope="module")
def origin(committed, tmp_path_factory, server) -> Clone:
    """Return a repository with the current files of this tree committed."""
    return Clone(committed, server, tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """Return a build folder with text and prepared data."""
    folder = tmp_path_factory.mktemp("build")
    set_up(folder, **SINGLE, CUSTOM_PATH=str(folder / "text"))
    return folder


@pytest.fixture(scope="module")
def original(origin, build) -> Path:
    """Return the directory of a run that the repository has trained."""
    code, _, said = origin.command("all", "-O", str(build))
    assert code == 0, said
    return planned(build)


def planned(build: Path) -> Path:
    return make_plan(config_layers(build), build).runs[0].path


def test_a_fresh_clone_makes_the_same_bytes(original, build, origin, tmp_path):
    clone = origin.clone(tmp_path)
    # Only the run directory is required; its path and name do not matter.
    run = Path(shutil.copytree(original, tmp_path / "a copy"))
    code, told, said = clone.reproduce(run, build / "data")
    assert code == 0, told + said
    assert told.startswith("BITWISE\n") and re.search(r"\b6 \w*.*metrics.jsonl", told)
    again = RunDir(clone.path / "reproduced" / "a copy")
    for file in (again.weights, again.metrics, again.per_query, again.sample):
        assert file.read_bytes() == (original / file.name).read_bytes()
    records = [json.loads(run.resolved_config.read_text()) for run in (again, RunDir(original))]
    assert records[0]["identity"] == records[1]["identity"]
    assert records[0]["settings"].items() <= records[1]["settings"].items()
    assert not (clone.path / ".config").exists() and git(clone.path, "status", "--short") == ""

    clone.edit()
    code, told, _ = clone.reproduce(original, build / "data")
    assert code == 4 and "code: gpt2/training/loop.py " in told
    sha = git(clone.path, "rev-parse", "HEAD").strip()
    assert f"git worktree add ../kablate-{sha[:8]} {sha} && make -C" in told
    code, told, said = clone.reproduce(original, build / "data", "--force", dirty="y")
    assert code == 1, told + said
    assert told.startswith("DIVERGED\n") and re.search("WARN .* code: gpt2/training/loop.py ", said)
    # The first loss is computed before the first step, so the edit shows in the second one.
    assert re.search(r"^ *first +metrics.jsonl, iteration 2: .*loss", told, re.MULTILINE)
    assert re.search(r"^ *label +code: gpt2/training/loop.py ", told, re.MULTILINE)


def test_a_run_of_two_ranks_from_an_edited_tree_is_made_again_from_its_diff(
    origin, build, tmp_path
):
    (tmp_path / "edited").mkdir()
    edited = origin.clone(tmp_path / "edited")
    edited.edit()
    given = {**SMALL, **SINGLE, "GPUS": 2, "BATCH_SIZE": 1}
    given["CUSTOM_PATH"] = str(build / "text")
    write_build(build, {name: value for name, value in given.items() if value is not None})
    code, _, said = edited.command("all", "-O", str(build))
    assert code == 3 and said.startswith("ERROR   ") and "gpt2/training/loop.py" in said
    assert "[code.uncommitted]" in said and "ALLOW_DIRTY=y" in said
    run = planned(build)
    assert not run.exists()
    _train_elsewhere(edited.path, build)
    check_recorded_code(edited.path, run)

    clone = origin.clone(tmp_path)
    code, told, _ = clone.reproduce(run, build / "data", "--json")
    advice = json.loads(told)["reasons"][-1]
    assert code == 4 and f"read {run / 'code.diff'}, which is code" in advice
    add, apply, make = map(shlex.split, advice.partition("type: ")[2].split(" && "))
    assert make == ["make", "-C", add[3], "reproduce", f"RUN={run}", f"DATA={build / 'data'}"]
    for command in (add, apply):
        subprocess.run(command, cwd=clone.path, check=True, capture_output=True)
    tree = replace(clone, path=clone.path / add[3])
    code, told, said = tree.reproduce(run, build / "data", dirty="y")
    assert code == 0, told + said
    assert told.startswith("BITWISE\n")
    ranks = json.loads((tree.path / "reproduced" / run.name / "manifest.json").read_text())
    assert ranks["processes"]["world_size"] == 2


def _train_elsewhere(tree: Path, build: Path) -> None:
    """Train from another repository with a ``lib``, with interpreters of their own."""
    elsewhere = tree.parent / "elsewhere"
    git(tree, "init", "-q", str(elsewhere))
    (elsewhere / "lib").mkdir()
    (elsewhere / "lib" / "__init__.py").write_text('raise SystemExit("another lib")\n')
    done = subprocess.run(
        [sys.executable, str(tree / "scripts/run_test_matrix.py"), "-O", str(build)],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(tree), "ALLOW_DIRTY": "y"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search("^DIRTY .*gpt2/training/loop.py", done.stderr, re.MULTILINE)


def check_recorded_code(tree: Path, run: Path) -> None:
    """Assert that the manifest has the tree that trained, not the repository of the working directory."""
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["volatile"]["git_root"] == str(tree)
    assert manifest["code"]["git_sha"] == git(tree, "rev-parse", "HEAD").strip()
    assert manifest["code"]["dirty_tree"] is True
    diff = {"file": "code.diff", "sha256": sha256_file(run / "code.diff")}
    assert manifest["code"]["diff"] == diff
