"""A finished run without one of its files is damaged in every command, not done."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gpt2.study.resolve import resolve_config
from gpt2.weights.source import weights_folder
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.runs.record import RunRecord, required_files
from lib.runs.run_dir import RunDir
from tests.gpt2.study.large_study import write_large_study
from tests.integration.conftest import SMALL
from tests.lib.fabricated import write_run
from tests.run_command import run_command

DAMAGES = {
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
    before = times(build)
    script, *words = command
    values = {"INTACT": str(intact.path), "RUN": str(damaged.path)}
    code, _, err = run_command(script, *(values.get(w, w) for w in words), "-O", str(build))
    assert code == 2 and "[run.damaged]" in err, err
    assert damaged.path.name in err and "timing.jsonl" in err and "make rerun RUNS=" in err, err
    assert before == times(build) and not (build / "reproduced").exists()


def test_the_weights_of_a_damaged_run_initialize_no_other(study):
    build, _, damaged = study
    settings = {**SMALL, "INIT_FROM": f"run:{damaged.path.name}"}
    config = resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", settings)])
    with pytest.raises(ConfigError) as caught:
        weights_folder(config, build)
    assert caught.value.codes == ["run.damaged"]


def times(build: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in (build / "results").rglob("*")}


@pytest.mark.slow
def test_a_damaged_run_of_another_study_is_refused_unless_an_intact_one_is_there(tmp_path):
    build = tmp_path / "build"
    (run,) = write_large_study(build, 1, steps="0", iterations=20, documents=5)
    intact, damaged = (run.path.parents[1] / study / run.path.name for study in ("one", "third"))
    shutil.copytree(run.path, damaged)
    (damaged / run.timing.name).unlink()
    shutil.move(run.path, intact)
    command = ["plan", "--steps", "0", "--seeds", "1", "--json", "-O", str(build)]
    for place, state in ((intact, "done"), (damaged, "damaged")):
        (row,) = json.loads(run_command(*command)[1])["runs"]
        assert (row["directory"], row["state"]) == (str(place), state)
        shutil.rmtree(intact, ignore_errors=True)
