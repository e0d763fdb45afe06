"""A finished run without one of its files is damaged in every command, not done."""

import json
import os
import shutil
from pathlib import Path

from lib.runs.record import required_files
from lib.runs.run_dir import RunDir
from tests.command_server import CommandServer, words_of
from tests.gpt2.records.test_hostile_strings import written_study

DAMAGES = (
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    lambda path: (path.unlink(), os.mkfifo(path)),
)
STUDY = ("--steps", "0", "--seeds", "1-9")


def test_a_finished_run_without_a_file_is_not_done(server: CommandServer, tmp_path: Path) -> None:
    """Each run of the study has another file that is absent, shorter or a pipe."""
    build = tmp_path / "build"
    intact, *damaged = runs = written_study(build, "0", "1-9")
    files = [RunDir(intact.path).status, *required_files(RunDir(intact.path))][1:]
    for number, (run, file) in enumerate(zip(damaged, files, strict=True)):
        DAMAGES[number % len(DAMAGES)](run.path / file.name)
    for name, words in (
        ("status", STUDY),
        ("plan", STUDY),
        ("ls", ()),
        ("report", STUDY),
    ):
        command = [*words_of(name), *words, "--json", "-O", str(build)]
        code, out, err = server.run(command, os.environ, tmp_path, build)
        assert code == 0 and "Traceback" not in err, err
        states = {run["seed"]: run["state"] for run in json.loads(out)["runs"]}
        expected = ["done", *["damaged"] * len(damaged)]
        assert [states[seed] for seed in sorted(states)] == expected, name
    before = {p: p.lstat().st_mtime_ns for run in runs for p in [run.path, *run.path.iterdir()]}
    command = [*words_of("all"), *STUDY, "-O", str(build)]
    code, _, err = server.run(command, os.environ, tmp_path, build)
    assert code == 2 and "[run.damaged]" in err and "make rerun RUNS=baseline" in err, err
    for run, file in zip(damaged, files, strict=True):
        assert any(run.path.name in line and file.name in line for line in err.splitlines()), err
    after = {p: p.lstat().st_mtime_ns for run in runs for p in [run.path, *run.path.iterdir()]}
    assert after == before


def test_a_command_that_uses_a_result_refuses_a_damaged_run(
    server: CommandServer, tmp_path: Path
) -> None:
    """The run has all that the commands would read, and lacks the record of its speed."""
    build = tmp_path / "build"
    damaged, intact = written_study(build, "0", "1-2")
    damaged.timing.unlink()
    name, path = damaged.path.name, str(damaged.path)
    for script, *options in (
        ("compare", str(intact.path), path),
        ("reproduce", "--twice", "--run", path),
        ("prolong", path, "--iters", "2"),
        ("export", path),
        ("generate", "--run", path),
        ("evaluate", "--run", path),
        ("verify-results", "--runs", path),
        ("all", "--steps", "0", "--seeds", "1", "--set", f"INIT_FROM=run:{name}"),
    ):
        command = [*words_of(script), *options, "-O", str(build)]
        code, _, err = server.run(command, os.environ, tmp_path, build)
        assert code == 2 and "[run.damaged]" in err, (script, err)
        assert name in err and "timing.jsonl" in err and "make rerun RUNS=" in err, (script, err)
    assert not (build / "reproduced").exists() and not (build / "results/prolonged").exists()


def test_a_damaged_run_of_another_study_is_refused_and_an_intact_one_is_reused(
    server: CommandServer, tmp_path: Path
) -> None:
    build = tmp_path / "build"
    (run,) = written_study(build, "0", "1")
    others = [run.path.parents[1] / study / run.path.name for study in ("another", "third")]
    for other in others:
        shutil.copytree(run.path, other)
    shutil.rmtree(run.path)
    (others[1] / run.timing.name).unlink()
    command = [*words_of("all"), "--steps", "0", "--seeds", "1", "-O", str(build)]
    code, _, err = server.run(command, os.environ, tmp_path, build)
    assert code == 0 and not run.path.exists(), err
    shutil.rmtree(others[0])
    code, _, err = server.run(command, os.environ, tmp_path, build)
    assert code == 2 and "[run.damaged]" in err and "third" in err, err
    assert not run.path.exists()
