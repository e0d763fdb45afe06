"""A report is written again if anything that it depends on has changed, and only then."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt2.planning.plan import config_layers, make_plan
from gpt2.records.run_files import write_resolved_config
from gpt2.running import launch
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE
from lib.runner.runner import RunnerOptions
from lib.runs import index
from tests.build_folder import write_build
from tests.gpt2.records.test_tables import asked
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, seal, write_run

STUDY = {**SMALL, "RA_MLA_ABLATION_STEPS": "0,ra", "VERDICT_AA": False}
OUTPUTS = ("table.md", "table.csv", "verdicts.json", "report.html")
# The clock of the file system advances in ticks of some milliseconds.
TICK_SECONDS = 0.012


class Reports:
    """Reports of one build folder, as further commands would write them."""

    def __init__(self, build: Path) -> None:
        self.build = build
        self.study = build / "results/ratio"
        self.written = 0
        # Planning takes longer than a report of two runs.
        self.plans: dict[str, Any] = {}

    @property
    def run(self) -> Path:
        """Return the directory of the first run."""
        return sorted(self.study.glob("baseline-s1-*"))[0]

    def report(self, *, json: bool = False, label_by: str = "", force: bool = False, **asked_: str):
        """Return the printed table and the content of the files."""
        time.sleep(TICK_SECONDS)
        if str(asked_) not in self.plans:
            self.plans[str(asked_)] = asked(self.build, **asked_)
        plan, whole, selected = self.plans[str(asked_)]
        labels = label_by.split()
        text = launch.report(
            plan, whole, selected=selected, json=json, label_by=labels, force=force
        )
        return text, [(self.study / name).read_text() for name in OUTPUTS]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Two finished runs with an up-to-date report; figures are not drawn."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "RACY_NS", 8_000_000)
    monkeypatch.setattr("lib.report.report_page.study_figures", lambda *arguments: [])
    build = tmp_path / "build"
    build.mkdir()
    write_build(build, STUDY)
    for run in make_plan(config_layers(build), build, seeds="1").runs:
        directory = write_run(run.path, identity=run.config.identity(), symbols=run.config.values)
        write_resolved_config(directory, run.config)
        seal(directory, MANIFEST)
        directory.sample.write_text("a sample")
    reports = Reports(build)
    write = launch._written

    def counted(*arguments):
        reports.written += 1
        return write(*arguments)

    monkeypatch.setattr(launch, "_written", counted)
    # The first report writes verdicts.json, which the second one reads.
    reports.report()
    reports.report()
    reports.written = 0
    return reports


def test_nothing_is_written_again_if_nothing_has_changed(reports: Reports) -> None:
    first = reports.report()
    modified = {name: (reports.study / name).stat().st_mtime_ns for name in OUTPUTS}
    assert reports.report() == first
    assert {name: (reports.study / name).stat().st_mtime_ns for name in OUTPUTS} == modified
    assert reports.written == 0
    assert reports.report(force=True) == first
    assert reports.written == 1


def test_make_with_nothing_to_train_writes_no_report(reports: Reports) -> None:
    stored, _ = reports.report()
    reports.written = 0
    plan, whole, _ = reports.plans["{}"]
    kept = RunnerOptions(stale="keep")
    modified = {name: (reports.study / name).stat().st_mtime_ns for name in OUTPUTS}
    assert launch.train_plan(plan, kept, whole) == (EXIT_DONE, stored)
    assert {name: (reports.study / name).stat().st_mtime_ns for name in OUTPUTS} == modified
    assert reports.written == 0
    # Verdicts that decide the exit code are judged from the files of the runs.
    code, text = launch.train_plan(plan, kept, whole, strict=True)
    assert code == EXIT_NOT_COMPARABLE and text == stored


def test_each_form_of_the_output_is_stored(reports: Reports) -> None:
    for options in ({"json": True}, {"steps": "0"}, {"label_by": "torch"}):
        first = reports.report(**options)
        if "label_by" in options:
            # The files with labels differ from those without.
            first = reports.report(**options)
        reports.written = 0
        assert reports.report(**options) == first
        assert reports.written == 0, options
        assert reports.report(force=True, **options) == first
    assert json.loads(reports.report(json=True)[0])["study"] == "ratio"


def with_its_size_and_time(path: Path) -> None:
    old, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def a_file(name: str) -> Callable[[Reports, pytest.MonkeyPatch], None]:
    return lambda reports, _: with_its_size_and_time(reports.run / name)


def removed_file(reports: Reports, _: pytest.MonkeyPatch) -> None:
    (reports.run / "metrics.jsonl").unlink()


def linked_file(reports: Reports, _: pytest.MonkeyPatch) -> None:
    path = reports.run / "metrics.jsonl"
    path.rename(reports.build / "metrics")
    path.symlink_to(reports.build / "metrics")


def new_file(reports: Reports, _: pytest.MonkeyPatch) -> None:
    (reports.run / "numerics_failure.json").touch()


def removed_run(reports: Reports, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(reports.run)
    reports.plans.clear()


def other_folder(reports: Reports, _: pytest.MonkeyPatch) -> None:
    (reports.study / "baseline-s1-00000000").mkdir()


def other_study(reports: Reports, _: pytest.MonkeyPatch) -> None:
    (reports.study.parent / "other").mkdir()
    (reports.study.parent / "other/verdicts.json").write_text('{"evaluation_set": "x"}')


def removed_output(reports: Reports, _: pytest.MonkeyPatch) -> None:
    (reports.study / "report.html").unlink()


def edited_output(reports: Reports, _: pytest.MonkeyPatch) -> None:
    with_its_size_and_time(reports.study / "table.md")


def setting(reports: Reports, _: pytest.MonkeyPatch) -> None:
    write_build(reports.build, {**STUDY, "VERDICT_BAND": "0.5"})
    reports.plans.clear()


def code(_: Reports, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index, "_code_digest", lambda: b"other")


def torch(_: Reports, patch: pytest.MonkeyPatch) -> None:
    for place in ("gpt2.records.report", "lib.runs.code"):
        patch.setattr(f"{place}.installed_torch", lambda: "9.9")


def package(reports: Reports, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sysconfig.get_path", lambda name: str(reports.build))


def fetched(_: Reports, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gpt2.records.report.history_state", lambda: [1])


def verbose(_: Reports, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("V", "1")


CHANGES = (
    *map(a_file, ("status.json", "manifest.json", "metrics.jsonl", "resolved_config.yaml")),
    *map(a_file, ("summary.json", "per_query.csv", "logs.txt", "timing.jsonl", "sample.txt")),
    a_file("model.safetensors"),
    *(linked_file, removed_file, new_file, removed_run, other_folder, other_study),
    *(removed_output, edited_output, setting, code, torch, package, fetched, verbose),
)


def test_each_change_writes_what_a_first_report_would_write(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in CHANGES:
        time.sleep(TICK_SECONDS)
        change(reports, monkeypatch)
        reports.report()
        assert reports.written == 1, change
        # A changed verdicts.json is an input of the next report.
        reports.report()
        reports.written = 0
        stored = reports.report()
        assert reports.written == 0, change
    assert reports.report(force=True) == stored


def test_a_table_with_labels_is_not_that_of_a_report_without(reports: Reports) -> None:
    plain = reports.report()
    reports.report(label_by="torch")
    assert reports.report() == plain


@pytest.mark.parametrize("reason", ["just written", "a tracker", "a loop", "no cache"])
def test_what_cannot_be_stored_is_written_each_time(
    reports: Reports, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "just written":
        monkeypatch.setattr(index, "RACY_NS", 10**12)
    elif reason == "a tracker":
        monkeypatch.setattr(launch, "send_verdicts", lambda *arguments: None)
        write_build(reports.build, {**STUDY, "TRACKER_TENSORBOARD": True})
        reports.plans.clear()
    elif reason == "a loop":
        (reports.run / "above").symlink_to(reports.run)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "none")
    # Another form: the stamp of this one exists.
    first = reports.report(json=True)
    assert reports.report(json=True) == first
    assert reports.written == 2
