"""Snapshots: content, refresh conditions, errors, and no credentials."""

import hashlib
import json
import shutil
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lib.env import snapshot
from lib.env.packages import current_interpreter, installed_packages, normalize_name
from lib.env.snapshot import (
    copy_snapshot,
    hardware_digests,
    observed_environment,
    redact_secrets,
    refresh_snapshot,
)
from lib.errors import PreflightError
from lib.runs.run_dir import RunDir

ALWAYS = {"packages.txt", "python_version.txt", "interpreter.json", "snapshot.json"}
OF_CONDA = {
    "conda_version.txt": "conda 26.1.0",
    "pip_version.txt": "pip 26.0",
    "conda_env_from_history.yml": "dependencies:",
    "conda_list_explicit.txt": "@EXPLICIT",
    "pip_freeze.txt": "numpy==2.4.6",
}


def index(folder):
    return json.loads((folder / "snapshot.json").read_text())


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_packages_are_those_of_importlib_and_the_first_of_a_name_counts(tmp_path):
    found = {normalize_name(d.metadata["Name"]): d.version for d in distributions()}
    assert installed_packages() == found
    infos = ("a/some_thing-1.0.dist", "b/Some.Thing-2.0.dist", "b/x-y-3-py3.11.egg")
    for name in infos:
        (tmp_path / f"{name}-info").mkdir(parents=True)
    folders = [str(tmp_path / name) for name in ("a", "b", "none")]
    assert installed_packages([*folders, ""]) == {"some-thing": "1.0", "x-y": "3"}


def test_the_policy_any_runs_no_program(config, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "run_program", None)
    refresh_snapshot(tmp_path, config, current_interpreter())
    assert names(tmp_path) == ALWAYS
    for name, digest in index(tmp_path)["files"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert index(tmp_path)["files"].keys() == ALWAYS - {"snapshot.json"}
    lines = [f"{name}=={version}" for name, version in sorted(installed_packages().items())]
    assert (tmp_path / "packages.txt").read_text().splitlines() == lines


def test_conda_s_six_files_and_what_pip_check_finds(conda, conda_config, program, tmp_path):
    folder = tmp_path / "snapshot"
    refresh_snapshot(folder, conda_config, conda)
    assert names(folder) == ALWAYS | OF_CONDA.keys()
    for name, line in OF_CONDA.items():
        assert line in (folder / name).read_text()
    found = {"exit_code": 0, "output": ["No broken requirements found."]}
    assert index(folder)["pip_check"] == found
    answers = {"*' --version'": "pip 26.0\n", "*' freeze'": "numpy==2.4.6\n", "*": 1}
    program("python", answers, conda.prefix / "bin")
    refresh_snapshot(tmp_path / "broken", conda_config, conda)
    assert index(tmp_path / "broken")["pip_check"] == {"exit_code": 1, "output": []}


# Answers of conda, the number of problems, the first code, and words of the message.
@pytest.mark.parametrize(
    ("answers", "count", "code", "words"),
    [
        ({"*": 3}, 3, "failed", "exit code 3"),
        ({"*": "\n \n"}, 3, "no-output", "conda --version"),
        ({"*": "mamba 2.0\n"}, 3, "invalid-output", "conda_version.txt, got 'mamba 2.0'"),
        ({"--version": "conda 26\n", "*": "x: [\n"}, 2, "invalid-output", "conda_env_from_history"),
        (None, 3, "cannot-run", "conda --version"),
    ],
)
def test_every_program_that_fails_is_named(
    conda, conda_config, program, tmp_path, answers, count, code, words
):
    if answers is None:
        (tmp_path / "programs" / "conda").unlink()
    else:
        program("conda", answers)
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(tmp_path / "snapshot", conda_config, conda)
    assert refusal.value.codes == [f"program.{code}"] * count and words in str(refusal.value)
    assert not (tmp_path / "snapshot").exists()


def test_uv_needs_no_pip_and_the_lock_file_is_copied(config, program, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "find_spec", lambda name: None)
    program("uv", {"--version": "uv 0.9.8 (abc 2026-01-01)\n"})
    interpreter = replace(current_interpreter(), kind="uv", program="/no/python")
    wanted = replace(config, policy="uv", lock_file="uv.lock")
    folder, lock = tmp_path / "snapshot", tmp_path / "uv.lock"
    refresh_snapshot(folder, wanted, interpreter, tmp_path)
    assert names(folder) == ALWAYS | {"uv_version.txt"}
    for text in ("version = 1\n", "version = 2\n"):
        lock.write_text(text)
        refresh_snapshot(folder, wanted, interpreter, tmp_path)
        assert (folder / "uv.lock").read_text() == text
    assert index(folder)["pip_check"] is None


def test_a_venv_is_frozen_if_it_has_pip(config, program, tmp_path, monkeypatch):
    pip = {"*' freeze'": "-e git+https://me:s3cret@host/x.git#egg=x\n", "*' check'": "fine\n"}
    interpreter = replace(current_interpreter(), program=str(program("python", pip)))
    for has_pip in (True, False):
        monkeypatch.setattr(snapshot, "find_spec", lambda name, found=has_pip: found or None)
        folder = tmp_path / f"snapshot-{has_pip}"
        refresh_snapshot(folder, replace(config, policy="venv"), interpreter)
        assert names(folder) == ALWAYS | ({"pip_freeze.txt"} if has_pip else set())
        assert (index(folder)["pip_check"] is not None) == has_pip
    # No password of a remote.
    frozen = (tmp_path / "snapshot-True" / "pip_freeze.txt").read_text()
    assert frozen == "-e git+https://host/x.git#egg=x\n"


@pytest.mark.parametrize(
    ("printed", "redacted"),
    [
        ("y @ https://me:s3@cret@host/y.whl", "y @ https://host/y.whl"),
        ("z @ git+ssh://git@host/z.git", "z @ git+ssh://git@host/z.git"),
        ("z @ git+ssh://me:s3cret@host/z.git", "z @ git+ssh://me@host/z.git"),
        ("https://conda.host/t/tk-s3cret/label", "https://conda.host/t/<TOKEN>/label"),
        ("mine @ file:///src\n-e git+https://b/c@d", "mine @ file:///src\n-e git+https://b/c@d"),
        # Variables of a conda environment.
        ("a: b\nvariables:\n  T: |\n    s3cret\n\n    s3cret\nprefix: /a\n", "a: b\nprefix: /a\n"),
        ("variables: {TOKEN: s3cret}\nprefix: /a\n", "prefix: /a\n"),
    ],
)
def test_credentials_are_removed(printed, redacted):
    assert redact_secrets(printed) == redacted


def test_a_recent_and_valid_snapshot_is_not_replaced(config, tmp_path, monkeypatch):
    clock = [1e9]
    monkeypatch.setattr("time.time", lambda: clock[0])

    def is_replaced(options=config):
        before = index(tmp_path).get("taken_at")
        clock[0] += 1
        refresh_snapshot(tmp_path, options, current_interpreter())
        return index(tmp_path)["taken_at"] != before

    refresh_snapshot(tmp_path, config, current_interpreter())
    assert not is_replaced()
    for hours, old in ((23.9, False), (0.2, True), (-0.1, True)):
        clock[0] += hours * 3600
        assert is_replaced() == old
    assert is_replaced(replace(config, snapshot_max_age_hours=0))
    for damage in (Path.unlink, lambda path: path.write_text("x==1\n")):
        damage(tmp_path / "packages.txt")
        assert is_replaced() and "numpy==" in (tmp_path / "packages.txt").read_text()
    (tmp_path / "snapshot.json").write_text("{}")
    assert is_replaced()
    changed = installed_packages() | {"numpy": "9.9"}
    monkeypatch.setattr(snapshot, "installed_packages", lambda: changed)
    assert is_replaced() and "numpy==9.9" in (tmp_path / "packages.txt").read_text()


def test_a_run_has_a_copy_and_its_digests(config, tmp_path):
    run = RunDir(tmp_path / "run")
    run.environment.mkdir(parents=True)
    (run.environment / "pip_freeze.txt").write_text("of an earlier start\n")
    folder = tmp_path / "environment"
    refresh_snapshot(folder, config, current_interpreter())
    (folder / "hw.json").write_text("{}\n")
    (folder / "nobody-s.txt").write_text("\n")
    copy_snapshot(tmp_path, run)
    assert names(run.environment) == ALWAYS | {"hw.json"}
    found = observed_environment(run, "any")
    assert found["snapshot"] == index(folder)["files"]
    assert found["packages_digest"] == found["snapshot"]["packages.txt"]
    here = current_interpreter()
    assert (found["kind"], found["name"], found["python"]) == (here.kind, here.name, here.python)
    assert found["conda_env_name"] is None
    assert hardware_digests(run).keys() == {"hw.json", "snapshot.json"}
    (run.environment / "packages.txt").write_text("edited==1\n")
    assert observed_environment(run, "any")["snapshot"] != found["snapshot"]
    shutil.rmtree(run.environment)
    assert observed_environment(run, "any")["snapshot"] == {} == hardware_digests(run)
