"""A finished run without one of its files is damaged in every command, not done."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.runs.record import RunRecord, required_files
from lib.runs.run_dir import RunDir
from tests.gpt2.study.large_study import write_large_study
from tests.lib.fabricated import write_run
from tests.run_command import run_command

DAMAGES: dict[str, Callable[[Path], Any]] = {
    "absent": Path.unlink,
    "shorter": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}
FILES = [path.name for path in required_files(RunDir(Path()))]
STUDY = ("--steps", "0", "--seeds", "1-2")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_every_file_of_a_finished_run_is_required(tmp_path, file, damage):
    run = write_run(tmp_path)
    assert RunRecord(run).state == "done"
    DAMAGES[damage](run.path / file)
    record = RunRecord(RunDir(tmp_path))
    assert record.state == "damaged" and file in record.damage


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, RunDir, RunDir]:
    """Return a folder with an intact run, and one that lacks the record of its speed only."""
    build = tmp_path_factory.mktemp("damaged") / "build"
    intact, damaged = write_large_study(build, 2, steps="0", iterations=20, documents=5)
    damaged.timing.unlink()
    return build, intact, damaged


@pytest.mark.parametrize(
    "command",
    [("status", *STUDY), ("plan", *STUDY), ("ls",), ("report", *STUDY)],
    ids=lambda words: words[0],
)
def test_a_command_that_lists_runs_shows_it_as_damaged(study, command):
    build, *_ = study
    script, *words = command
    code, out, err = run_command(script, *words, "--json", "-O", str(build))
    assert code == 0 and "Traceback" not in err, err
    states = {run["seed"]: run["state"] for run in json.loads(out)["runs"]}
    assert states == {1: "done", 2: "damaged"}


@pytest.mark.parametrize(
    "command",
    [
        ("all", *STUDY),
        ("all", "--steps", "0", "--seeds", "1", "--set", "INIT_FROM=run:NAME"),
        ("compare", "INTACT", "RUN"),
        ("reproduce", "--twice", "--run", "RUN"),
        ("prolong", "RUN", "--iters", "2"),
        ("export", "RUN"),
        ("generate", "--run", "RUN"),
        ("evaluate", "--run", "RUN"),
        ("verify-results", "--runs", "RUN"),
    ],
    ids=" ".join,
)
def test_a_command_that_uses_a_result_refuses_it(study, command):
    """Also one that would not read the file."""
    build, intact, damaged = study
    before = {path: path.lstat().st_mtime_ns for path in (build / "results").rglob("*")}
    script, *words = command
    values = {"INTACT": str(intact.path), "RUN": str(damaged.path)}
    words = [values.get(word, word).replace("NAME", damaged.path.name) for word in words]
    code, _, err = run_command(script, *words, "-O", str(build))
    assert code == 2 and "[run.damaged]" in err, err
    assert damaged.path.name in err and "timing.jsonl" in err and "make rerun RUNS=" in err, err
    assert before == {path: path.lstat().st_mtime_ns for path in (build / "results").rglob("*")}
    assert not (build / "reproduced").exists()


@pytest.mark.slow
def test_a_damaged_run_of_another_study_is_refused_and_an_intact_one_is_reused(tmp_path):
    build = tmp_path / "build"
    (run,) = write_large_study(build, 1, steps="0", iterations=20, documents=5)
    others = [run.path.parents[1] / study / run.path.name for study in ("another", "third")]
    for other in others:
        shutil.copytree(run.path, other)
    shutil.rmtree(run.path)
    (others[1] / run.timing.name).unlink()
    command = ["all", "--steps", "0", "--seeds", "1", "-O", str(build)]
    code, _, err = run_command(*command)
    assert code == 0 and not run.path.exists(), err
    shutil.rmtree(others[0])
    code, _, err = run_command(*command)
    assert code == 2 and "[run.damaged]" in err and "third" in err, err
    assert not run.path.exists()
