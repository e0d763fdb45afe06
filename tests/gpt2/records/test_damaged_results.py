"""A finished run without one of its files is damaged in every command, not done."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lib.runs.record import required_files
from lib.runs.run_dir import RunDir
from tests.command_server import CommandServer, words_of
from tests.gpt2.records.test_hostile_strings import written_study

DAMAGES = {
    "absent": lambda path: path.unlink(),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_without_a_file_is_not_done(
    damage: str, server: CommandServer, tmp_path: Path
) -> None:
    """Each run of the study lacks another file."""
    build = tmp_path / "build"
    runs = written_study(build, "0", "1-9")
    intact, *damaged = runs
    files = [RunDir(intact.path).status, *required_files(RunDir(intact.path))][1:]
    for run, file in zip(damaged, files, strict=True):
        DAMAGES[damage](run.path / file.name)
    selected = ("--steps", "0", "--seeds", "1-9", "--json")
    for script, words in (
        ("status", selected),
        ("plan", selected),
        ("ls", ("--json",)),
        ("report", selected),
    ):
        command = [*words_of(script), *words, "-O", str(build)]
        code, out, err = server.run(command, os.environ, tmp_path, build)
        assert code == 0 and "Traceback" not in err, err
        shown = {
            Path(r["run"]).name if "seed" not in r else r["seed"]: r
            for r in json.loads(out)["runs"]
        }
        states = [run["state"] for run in sorted(shown.values(), key=lambda run: run["seed"])]
        assert states == ["done", *["damaged"] * len(damaged)], (script, states)
    command = [*words_of("all"), *selected[:4], "-O", str(build)]
    before = {p: p.lstat().st_mtime_ns for run in runs for p in [run.path, *run.path.iterdir()]}
    code, _, err = server.run(command, os.environ, tmp_path, build)
    assert code == 2 and "[run.damaged]" in err and "make rerun RUNS=baseline" in err, err
    for run, file in zip(damaged, files, strict=True):
        assert any(run.path.name in line and file.name in line for line in err.splitlines()), err
    assert before == {
        p: p.lstat().st_mtime_ns for run in runs for p in [run.path, *run.path.iterdir()]
    }


def test_a_command_that_uses_a_result_refuses_a_damaged_run(
    server: CommandServer, tmp_path: Path
) -> None:
    """The run has all that the commands would read, and lacks the record of its speed."""
    build = tmp_path / "build"
    damaged, intact = written_study(build, "0", "1-2")
    damaged.timing.unlink()
    name = damaged.path.name
    for words in (
        ("compare", str(damaged.path), str(intact.path)),
        ("compare", str(intact.path), str(damaged.path)),
        ("reproduce", "--run", str(damaged.path)),
        ("reproduce", "--twice", "--run", str(damaged.path)),
        ("prolong", str(damaged.path), "--iters", "2"),
        ("export", str(damaged.path)),
        ("generate", "--run", str(damaged.path)),
        ("evaluate", "--run", str(damaged.path)),
        ("verify-results", "--steps", "0", "--seeds", "1-2"),
        ("verify-results", "--runs", str(damaged.path)),
        ("all", "--steps", "0", "--seeds", "1", "--set", f"INIT_FROM=run:{name}"),
        ("all", "--steps", "0", "--seeds", "1-2"),
    ):
        script, *options = words
        command = [*words_of(script), *options, "-O", str(build)]
        code, _, err = server.run(command, os.environ, tmp_path, build)
        assert code == 2 and "[run.damaged]" in err, (words, err)
        assert name in err and "timing.jsonl" in err and "make rerun RUNS=" in err, (words, err)
    assert not (build / "reproduced").exists() and not (build / "results/prolonged").exists()


def test_a_damaged_run_of_another_study_is_refused_and_an_intact_one_is_reused(
    server: CommandServer, tmp_path: Path
) -> None:
    build = tmp_path / "build"
    (run,) = written_study(build, "0", "1")
    others = [run.path.parents[1] / study / run.path.name for study in ("another", "third")]
    shutil.copytree(run.path, others[0])
    shutil.copytree(run.path, others[1])
    shutil.rmtree(run.path)
    (others[1] / run.timing.name).unlink()
    command = [*words_of("all"), "--steps", "0", "--seeds", "1"]
    code, _, err = server.run([*command, "-O", str(build)], os.environ, tmp_path, build)
    assert code == 0 and not run.path.exists(), err
    shutil.rmtree(others[0])
    for damage in (lambda: None, (others[1] / run.status.name).unlink):
        damage()
        code, _, err = server.run([*command, "-O", str(build)], os.environ, tmp_path, build)
        assert code == 2 and "[run.damaged]" in err and "third" in err, err
        assert not run.path.exists()
