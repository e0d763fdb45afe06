"""Snapshots: content, refresh conditions and errors."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lib.env import snapshot
from lib.env.options import EnvironmentConfig
from lib.env.packages import Interpreter, current_interpreter, installed_packages, normalize_name
from lib.env.snapshot import copy_snapshot, hardware_digests, observed_environment, refresh_snapshot
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


def index(folder: Path) -> dict:
    return json.loads((folder / "snapshot.json").read_text())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_packages_are_those_that_importlib_finds() -> None:
    assert installed_packages() == {
        normalize_name(d.metadata["Name"]): d.version for d in distributions()
    }


def test_the_first_of_a_name_counts_and_old_forms_are_read(tmp_path: Path) -> None:
    for name in (
        "a/some_thing-1.0.dist-info",
        "b/Some.Thing-2.0.dist-info",
        "b/x-y-3-py3.11.egg-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    found = installed_packages(
        [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none"), ""]
    )
    assert found == {"some-thing": "1.0", "x-y": "3"}


def test_any_policy_asks_no_program(
    config: EnvironmentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.env.snapshot.run_program", None)
    monkeypatch.setattr(snapshot, "run_program", None)
    refresh_snapshot(tmp_path, config, current_interpreter())
    assert names(tmp_path) == ALWAYS
    found = index(tmp_path)
    for name in ALWAYS - {"snapshot.json"}:
        content = (tmp_path / name).read_bytes()
        assert found["files"][name] == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "packages.txt").read_text().splitlines() == [
        f"{name}=={version}" for name, version in sorted(installed_packages().items())
    ]


def test_conda_s_six_files(
    conda: Interpreter, conda_config: EnvironmentConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshot"
    refresh_snapshot(folder, conda_config, conda)
    assert names(folder) == ALWAYS | OF_CONDA.keys()
    for name, line in OF_CONDA.items():
        assert line in (folder / name).read_text()
    check = {"exit_code": 0, "output": ["No broken requirements found."]}
    assert index(folder)["pip_check"] == check


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({"*": 3}, "program.failed", "exit code 3"),
        ({"*": ""}, "program.no-output", "--version"),
        ({"*": "\n \n"}, "program.no-output", "--version"),
        ({"*": "mamba 2.0\n"}, "program.invalid-output", "conda_version.txt, got 'mamba 2.0'"),
        (
            {"--version": "conda 26.1.0\n", "*": "x: [\n"},
            "program.invalid-output",
            "conda_env_from_history.yml",
        ),
    ],
)
def test_a_program_that_fails_is_named(
    conda: Interpreter,
    conda_config: EnvironmentConfig,
    program: Callable,
    tmp_path: Path,
    answers: dict,
    code: str,
    words: str,
) -> None:
    program("conda", answers)
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(tmp_path / "snapshot", conda_config, conda)
    assert code in refusal.value.codes
    assert words in str(refusal.value) and "conda" in str(refusal.value)
    assert not (tmp_path / "snapshot").exists()


def test_all_that_fail_are_named_at_once(
    conda: Interpreter, conda_config: EnvironmentConfig, program: Callable, tmp_path: Path
) -> None:
    program("conda", {"*": 3})
    program("python", {"*": ""}, conda.prefix / "bin")
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(tmp_path / "snapshot", conda_config, conda)
    assert len(refusal.value.problems) == 5


def test_a_program_that_is_not_there(
    conda: Interpreter, conda_config: EnvironmentConfig, tmp_path: Path
) -> None:
    (tmp_path / "programs" / "conda").unlink()
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(tmp_path / "snapshot", conda_config, conda)
    assert "program.cannot-run" in refusal.value.codes
    assert "conda --version" in str(refusal.value)


def test_what_pip_check_finds_is_recorded_and_refuses_nothing(
    conda: Interpreter, conda_config: EnvironmentConfig, program: Callable, tmp_path: Path
) -> None:
    answers = {"*' --version'": "pip 26.0\n", "*' freeze'": "a==1\n", "*": 1}
    program("python", answers, conda.prefix / "bin")
    refresh_snapshot(tmp_path / "snapshot", conda_config, conda)
    assert index(tmp_path / "snapshot")["pip_check"] == {"exit_code": 1, "output": []}


def test_uv_needs_no_pip_and_the_lock_file_is_kept(
    config: EnvironmentConfig,
    program: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "find_spec", lambda name: None)
    program("uv", {"--version": "uv 0.9.8 (abc 2026-01-01)\n"})
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyvenv.cfg").write_text("uv = 0.9.8\n")
    found = current_interpreter(tmp_path / "mine", Path("/usr"))
    wanted = replace(config, policy="uv", lock_file="uv.lock")
    refresh_snapshot(tmp_path / "snapshot", wanted, found, tmp_path)
    assert names(tmp_path / "snapshot") == ALWAYS | {"uv_version.txt", "uv.lock"}
    assert index(tmp_path / "snapshot")["pip_check"] is None
    (tmp_path / "uv.lock").write_text("version = 2\n")
    refresh_snapshot(tmp_path / "snapshot", wanted, found, tmp_path)
    assert (tmp_path / "snapshot" / "uv.lock").read_text() == "version = 2\n"
    refresh_snapshot(tmp_path / "other", replace(wanted, lock_file="gone.lock"), found, tmp_path)
    assert names(tmp_path / "other") == ALWAYS | {"uv_version.txt"}


@pytest.mark.parametrize("has_pip", [True, False])
def test_a_venv_is_frozen_where_it_has_pip(
    config: EnvironmentConfig,
    conda: Interpreter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_pip: bool,
) -> None:
    monkeypatch.setattr(snapshot, "find_spec", lambda name: object() if has_pip else None)
    refresh_snapshot(tmp_path / "snapshot", replace(config, policy="venv"), conda)
    frozen = {"pip_freeze.txt"} if has_pip else set()
    assert names(tmp_path / "snapshot") == ALWAYS | frozen
    assert (index(tmp_path / "snapshot")["pip_check"] is not None) == has_pip


class TestRefresh:
    """A recent and valid snapshot is not replaced."""

    @pytest.fixture
    def taken(self, config: EnvironmentConfig, tmp_path: Path) -> Path:
        refresh_snapshot(tmp_path, config, current_interpreter())
        return tmp_path

    def again(self, folder: Path, config: EnvironmentConfig) -> bool:
        """Refresh; return whether the snapshot was replaced."""
        before = index(folder)["taken_at"]
        refresh_snapshot(folder, config, current_interpreter())
        return index(folder)["taken_at"] != before

    def test_only_when_it_is_old(
        self, taken: Path, config: EnvironmentConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not self.again(taken, config)
        now = index(taken)["taken_at"]
        for hours, old in ((23.9, False), (24.1, True), (-0.1, True)):
            monkeypatch.setattr("time.time", lambda: now + hours * 3600)
            assert self.again(taken, config) == old
            now = index(taken)["taken_at"]
        monkeypatch.setattr("time.time", lambda: now + 1)
        assert self.again(taken, replace(config, snapshot_max_age_hours=0))

    def test_when_a_package_has_changed(
        self, taken: Path, config: EnvironmentConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            snapshot, "installed_packages", lambda: installed_packages() | {"numpy": "9.9"}
        )
        assert self.again(taken, config)
        assert "numpy==9.9" in (taken / "packages.txt").read_text()

    @pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("x==1\n")])
    def test_when_a_file_is_gone_or_edited(
        self, taken: Path, config: EnvironmentConfig, damage: Callable
    ) -> None:
        damage(taken / "packages.txt")
        assert self.again(taken, config)
        assert "numpy==" in (taken / "packages.txt").read_text()

    def test_when_its_own_record_cannot_be_read(
        self, taken: Path, config: EnvironmentConfig
    ) -> None:
        (taken / "snapshot.json").write_text("{")
        refresh_snapshot(taken, config, current_interpreter())
        assert index(taken)["policy"] == "any"


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere"])
def test_a_folder_that_cannot_be_written_to(
    config: EnvironmentConfig, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "environment"
    folder.write_text("") if kind == "a file" else folder.symlink_to("/proc/nothing/here")
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(folder, config, current_interpreter())
    (problem,) = refusal.value.problems
    assert problem.code == "disk.write-failed" and problem.where == str(folder)


def test_a_read_only_folder(
    config: EnvironmentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File permissions do not stop root, which runs the tests on some machines."""

    def refuse(path: Path, content: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(snapshot, "write_atomic", refuse)
    with pytest.raises(PreflightError) as refusal:
        refresh_snapshot(tmp_path, config, current_interpreter())
    assert refusal.value.codes == ["disk.write-failed"]
    assert "Read-only file system" in str(refusal.value)


def test_a_run_keeps_a_copy_and_its_digests(config: EnvironmentConfig, tmp_path: Path) -> None:
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
