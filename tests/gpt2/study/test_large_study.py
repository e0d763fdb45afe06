"""Planning a study of many runs: the work for each run is small and does not grow with the others."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from gpt2.running.results import judged_document
from gpt2.study.plan import config_layers, make_plan, table_plan
from gpt2.study.view import look
from lib import json_files
from lib.config.dotconfig import defconfig_layers
from lib.files import sha256_file
from lib.project import ROOT
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_build
from tests.gpt2.study.large_study import write_large_study


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """A build folder with the finished runs of all steps and one seed."""
    folder = tmp_path_factory.mktemp("build") / "large"
    write_large_study(folder, 1, iterations=2, documents=1)
    return folder


@pytest.fixture
def reads(monkeypatch) -> Counter[Path]:
    """Count the records that are read."""
    counts: Counter[Path] = Counter()
    read = json_files.read_record

    def counted(path: Path, *arguments: object) -> bytes:
        counts[path] += 1
        return read(path, *arguments)

    monkeypatch.setattr("lib.json_files.read_record", counted)
    monkeypatch.setattr("lib.runs.record.read_record", counted)
    return counts


@pytest.mark.slow
def test_each_file_of_a_run_is_read_once_and_runs_are_listed_together(build, reads, monkeypatch):
    digested: Counter[str] = Counter()
    asked: list[str] = []
    stat = Path.stat

    def digest(name: str) -> str:
        digested[name] += 1
        return sha256_file(ROOT / name)

    def counted(path: Path, **options: bool) -> os.stat_result:
        asked.append(path.parent.name)
        return stat(path, **options)

    layers = config_layers(build)
    reads.clear()
    monkeypatch.setattr("lib.runs.code._digest", digest)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", counted)
        plan = make_plan(layers, build, steps="all", seeds="1")
        assert table_plan(plan).runs == plan.runs and plan.folder.name not in asked
    rows = look(plan)
    assert {(row["state"], row["seconds_from"]) for row in rows} == {("done", "measured")}
    counts = Counter(path.name for path in reads)
    assert counts == dict.fromkeys(("status.json", "summary.json", "manifest.json"), len(rows))
    # All runs record the same files.
    assert set(reads.values()) == set(digested.values()) == {1}
    part = make_plan(layers, build, steps="0,1", seeds="1")
    assert {run.path for run in table_plan(part).runs} == {run.path for run in plan.runs}
    reads.clear()
    judged_document(part)
    of_runs = {path: count for path, count in reads.items() if path.parent.parent == plan.folder}
    assert {path.name for path in of_runs} >= {"status.json", "manifest.json", "summary.json"}
    assert set(of_runs.values()) == {1}


def test_a_link_that_leads_nowhere_is_no_run(tmp_path):
    write_build(tmp_path, {"DEVICE_CPU": True}, *defconfig_layers(ROOT, "gpt2-ratio-small"))
    layers = config_layers(tmp_path)
    run = make_plan(layers, tmp_path, steps="0", seeds="1").runs[0]
    other = tmp_path / "results/other" / run.path.name
    other.mkdir(parents=True)
    write_status(RunDir(other), RunStatus(State.SUCCESS))
    run.path.parent.mkdir()
    run.path.symlink_to("nowhere")
    assert make_plan(layers, tmp_path, steps="0", seeds="1").runs[0].path == other
    run.path.unlink()
    run.path.mkdir()
    assert make_plan(layers, tmp_path, steps="0", seeds="1").runs[0].path == run.path


def test_a_finished_run_in_the_folder_of_another_one_is_not_done(tmp_path):
    write_large_study(tmp_path / "build", 1, steps="0,1", iterations=2, documents=1)
    layers = config_layers(tmp_path / "build")
    plan = make_plan(layers, tmp_path / "build", steps="0,1", seeds="1")
    run, other = plan.runs
    shutil.rmtree(run.path)
    shutil.copytree(other.path, run.path)
    views = {view["label"]: view for view in look(plan)}
    assert views[run.label]["state"] == "damaged" and views[other.label]["state"] == "done"
    assert other.config.hash8 in views[run.label]["problem"]
