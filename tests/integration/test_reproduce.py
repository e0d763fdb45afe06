"""Reproduction of a run in a fresh clone, from its directory and the data."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.study.plan import config_layers, make_plan
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.command_server import CommandServer
from tests.integration.conftest import SMALL

# A line of the trainer, and an edit that changes a training from its second step on.
LINE = "    measured = optimizer_step(session, micro_batches, lr)\n"
EDIT = "    measured = optimizer_step(session, micro_batches, lr * 1.01)\n"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class Clone:
    """A copy of the tree under git."""

    path: Path
    server: CommandServer
    scratch: Path

    def command(self, name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run a command of this tree; return exit code, stdout and stderr."""
        unset = ("V", "JSON", "STEPS", "RUN", "DATA", "FORCE")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        given = {"PYTHONPATH": str(self.path), "ALLOW_DIRTY": "y", **variables}
        command = ["-m", "lib.kablate", name, *arguments]
        return self.server.run(command, environment | given, self.scratch, self.path)

    def edit(self) -> None:
        trainer = self.path / "gpt2" / "training" / "loop.py"
        assert LINE in trainer.read_text()
        trainer.write_text(trainer.read_text().replace(LINE, EDIT))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Clone:
    """Return a repository with the current files of this tree committed."""
    folder = tmp_path_factory.mktemp("origin") / "tree"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return Clone(folder, server, tmp_path_factory.mktemp("streams"))


@pytest.fixture
def clone(origin: Clone, tmp_path: Path) -> Clone:
    """Return a fresh clone of ``origin``."""
    git(tmp_path, "clone", "-q", str(origin.path), "clone")
    return replace(origin, path=tmp_path / "clone")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a build folder with text and prepared data."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "text").mkdir()
    for i in range(12):
        (folder / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)
    configure(folder)
    prepare_dataset(make_plan(config_layers(folder), folder).base.data, folder)
    return folder


def configure(folder: Path, **settings: object) -> None:
    given = {**SMALL, "CUSTOM_PATH": str(folder / "text"), **settings}
    del given["RA_MLA_ABLATION_MODE"]
    write_build(folder, {**given, "SINGLE_TRAINING": True, "CPU_THREADS": 1})


def trained(tree: Clone, build: Path) -> Path:
    """Train the configuration of ``build``; return the run directory."""
    code, _, said = tree.command("all", "-O", str(build))
    assert code == 0, said
    return make_plan(config_layers(build), build).runs[0].path


@pytest.fixture(scope="module")
def original(origin: Clone, build: Path) -> Path:
    return trained(origin, build)


def reproduce(tree: Clone, run: Path, data: Path, *more: str) -> tuple[int, str, str]:
    return tree.command("reproduce", "--run", str(run), "--data", str(data), *more)


def test_a_fresh_clone_makes_the_same_bytes(original, build, clone, tmp_path):
    # Only the run directory is required; its path and name do not matter.
    run = Path(shutil.copytree(original, tmp_path / "a copy"))
    code, told, said = reproduce(clone, run, build / "data")
    assert code == 0, told + said
    assert told.startswith("BITWISE\n") and re.search(r"\b6 \w*.*metrics.jsonl", told)
    again = RunDir(clone.path / "reproduced" / "a copy")
    for file in (again.weights, again.metrics, again.per_query, again.sample):
        assert file.read_bytes() == (original / file.name).read_bytes()
    records = [json.loads(run.resolved_config.read_text()) for run in (again, RunDir(original))]
    assert records[0]["identity"] == records[1]["identity"]
    assert records[0]["settings"].items() <= records[1]["settings"].items()
    assert "N_EMBD" in records[0]["settings"]
    assert not (clone.path / ".config").exists() and git(clone.path, "status", "--short") == ""


def test_an_edited_tree_is_refused_and_when_forced_diverges(original, build, clone):
    clone.edit()
    code, told, _ = reproduce(clone, original, build / "data")
    assert code == 4 and "code: gpt2/training/loop.py " in told
    sha = git(clone.path, "rev-parse", "HEAD").strip()
    assert f"git worktree add ../kablate-{sha[:8]} {sha} && make -C" in told
    code, told, said = reproduce(clone, original, build / "data", "--force")
    assert code == 1, told + said
    assert told.startswith("DIVERGED\n") and re.search("WARN .* code: gpt2/training/loop.py ", said)
    # The first loss is computed before the first step, so the edit shows in the second one.
    assert re.search(r"^ *first +metrics.jsonl, iteration 2: .*loss", told, re.MULTILINE)
    assert re.search(r"^ *label +code: gpt2/training/loop.py ", told, re.MULTILINE)


def test_a_run_of_two_ranks_from_an_edited_tree_is_made_again_from_its_diff(
    origin, build, clone, tmp_path
):
    edited = replace(origin, path=tmp_path / "edited")
    git(tmp_path, "clone", "-q", str(origin.path), str(edited.path))
    edited.edit()
    configure(build, GPUS=2, BATCH_SIZE=1)
    run = trained(edited, build)
    # In the format written by the trainer.
    (run / "code.diff").write_text(git(edited.path, "diff", "--binary", "HEAD"))
    code, told, _ = reproduce(clone, run, build / "data", "--json")
    advice = json.loads(told)["reasons"][-1]
    assert code == 4 and f"read {run / 'code.diff'}, which is code" in advice
    add, apply, make = map(shlex.split, advice.partition("type: ")[2].split(" && "))
    assert make == ["make", "-C", add[3], "reproduce", f"RUN={run}", f"DATA={build / 'data'}"]
    for command in (add, apply):
        subprocess.run(command, cwd=clone.path, check=True, capture_output=True)
    tree = clone.path / add[3]
    code, told, said = reproduce(replace(clone, path=tree), run, build / "data")
    assert code == 0, told + said
    assert told.startswith("BITWISE\n")
    ranks = json.loads((tree / "reproduced" / run.name / "manifest.json").read_text())
    assert ranks["processes"]["world_size"] == 2
