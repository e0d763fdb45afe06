"""Planning a study of many runs: the work for each run is small and does not grow with the others."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from gpt2.running.results import judged_study
from gpt2.study.plan import Plan, config_layers, make_plan, table_plan
from gpt2.study.view import look
from lib import json_files
from lib.config.dotconfig import defconfig_layers
from lib.files import json_digest, sha256_file
from lib.project import ROOT
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_build
from tests.gpt2.study.large_study import write_large_study


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """A build folder with the finished runs of all steps and two seeds; tests change no file."""
    folder = tmp_path_factory.mktemp("build") / "large"
    write_large_study(folder, 2, iterations=2, documents=1)
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


def test_a_plan_reads_three_files_of_each_finished_run_once(build, reads, monkeypatch):
    digested: Counter[str] = Counter()

    def digest(name: str) -> str:
        digested[name] += 1
        return sha256_file(ROOT / name)

    layers = config_layers(build)
    reads.clear()
    monkeypatch.setattr("lib.runs.code._digest", digest)
    plan = make_plan(layers, build, steps="all", seeds="1-2")
    rows = look(plan)
    assert {(row["state"], row["seconds_from"]) for row in rows} == {("done", "measured")}
    counts = Counter(path.name for path in reads)
    assert counts == dict.fromkeys(("status.json", "summary.json", "manifest.json"), len(rows))
    # All runs record the same files.
    assert set(reads.values()) == set(digested.values()) == {1}
    # The parts of the digest that the seeds share are formatted once.
    assert all(run.config.digest == json_digest(run.config.identity()) for run in plan.runs)


def test_a_plan_does_not_look_for_runs_one_by_one(build, monkeypatch):
    asked: list[object] = []
    stat = Path.stat

    def counted(path: Path, **options: bool) -> os.stat_result:
        asked.append(path.parent.name)
        return stat(path, **options)

    layers = config_layers(build)
    monkeypatch.setattr(Path, "stat", counted)
    plan = make_plan(layers, build, steps="all", seeds="1-2")
    # The folder of the study is listed, and its runs are not looked for one by one.
    assert plan.folder.name not in asked
    whole = table_plan(plan)
    assert whole.runs == plan.runs and plan.folder.name not in asked
    part = make_plan(layers, build, steps="0,1", seeds="2")
    assert {run.path for run in table_plan(part).runs} == {run.path for run in plan.runs}


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


@pytest.fixture(scope="module")
def small_plan(build) -> Plan:
    """Three finished runs."""
    return make_plan(config_layers(build), build, steps="0,1,7", seeds="1").only("baseline,ra*")


def test_a_finished_run_in_the_folder_of_another_one_is_not_done(small_plan):
    run, other = small_plan.runs[:2]
    intact = run.path.with_name(".intact")
    run.path.rename(intact)
    try:
        shutil.copytree(other.path, run.path)
        views = {view["label"]: view for view in look(small_plan)}
        assert views[run.label]["state"] == "damaged" and views[other.label]["state"] == "done"
        assert other.config.hash8 in views[run.label]["problem"]
    finally:
        shutil.rmtree(run.path)
        intact.rename(run.path)


def test_a_judged_study_reads_each_record_of_a_run_once(build, reads):
    plan = make_plan(config_layers(build), build, steps="0,1", seeds="1")
    reads.clear()
    judged_study(plan)
    of_runs = {path: count for path, count in reads.items() if path.parent.parent == plan.folder}
    assert {path.name for path in of_runs} >= {"status.json", "manifest.json", "summary.json"}
    assert set(of_runs.values()) == {1}
