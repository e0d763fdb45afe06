"""A report of indexed runs is the report that would be written from their files, byte for byte."""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2.planning.plan import Plan, config_layers, make_plan
from gpt2.running import launch
from lib import json_files
from lib.errors import KablateError
from lib.report import series
from lib.runs import index
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_build
from tests.fuzz import mutations
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, changed, seal
from tests.lib.report.fabricated_study import write_planned

OUTPUTS = ("table.md", "table.csv", "verdicts.json", "report.html")
# The clock of the file system advances in ticks of some milliseconds.
TICK_SECONDS = 0.012


class Study:
    """Finished runs of two steps, and reports as further commands would write them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.curves: list[Any] = []

    def report(self, *, force: bool = False) -> list[Any]:
        """Return all that a report prints, writes and draws; nothing is left of the one before."""
        for name in OUTPUTS:
            (self.plan.folder / name).unlink(missing_ok=True)
        self.curves.clear()
        try:
            text = launch.report(self.plan, self.plan, selected=False, json=True, force=force)
        except KablateError as error:
            return [problem.what for problem in error.problems]
        files = [(self.plan.folder / name).read_text() for name in OUTPUTS]
        return [text, *files, *self.curves]

    def draw(self, table: Any, rows: Any, flops: Any) -> list[Any]:
        """Remember the curves in place of drawing them."""
        self.curves += [series.training_curves(rows), series.training_differences(rows)]
        self.curves += [series.evaluation_curves(rows), series.evaluation_differences(rows)]
        self.curves += [[r.curves.spikes for row in rows for r in row.results]]
        for row in rows:
            self.curves += [series.statistics_curves(row), series.document_differences(row)]
        return []


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("build")
    write_build(folder, {**SMALL, "RA_MLA_ABLATION_STEPS": "0,ra", "VERDICT_AA": False})
    plan = make_plan(config_layers(folder), folder, seeds="1-3")
    for number, run in enumerate(plan.runs):
        # The last one is shorter: its curve is binned like that of the longest.
        iterations = 12 if run is not plan.runs[-1] else 9
        write_planned(run, iterations, 3, symbols=run.config.values, manifest=MANIFEST)
        sample = {"ts": 1.0, "rss_mib": 5.0 + number, "cpu_seconds": 1.0, "gpus": []}
        RunDir(run.path).telemetry.write_text(f"{json.dumps(sample)}\n" * 3)
    study = Study(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(index, "MIN_NEW_ENTRIES", 1)
        patch.setattr(index, "RACY_NS", 8_000_000)
        patch.setattr("lib.report.report_page.study_figures", study.draw)
        time.sleep(TICK_SECONDS)
        yield study


def in_each_way(study: Study) -> None:
    """Compare the report of indexed runs with one that reads every file."""
    indexed = study.report()
    assert study.report() == indexed
    without = SimpleNamespace(read=lambda run, names, read: read()[0], save=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "results_index", lambda *arguments, **options: without)
        assert study.report() == indexed


def failed(run: Path) -> None:
    write_status(RunDir(run), RunStatus(State.FAILED, 1, "loss is nan"))
    (run / "numerics_failure.json").write_text("{}")


def another_loss(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["final"]["val_loss"] += 0.5
    (run / "summary.json").write_text(json.dumps(summary))
    seal(RunDir(run), MANIFEST)


def another_device(run: Path) -> None:
    seal(RunDir(run), changed(MANIFEST, hardware__cpu_capability="AVX512"))


def a_spike(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [row for row in rows if row["kind"] == "train"][-1]["loss"] = 900.0
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    seal(RunDir(run), MANIFEST)


def infinite_telemetry(run: Path) -> None:
    sample = {"ts": 1.0, "rss_mib": 1e308, "cpu_seconds": 1.0, "gpus": []}
    (run / "telemetry.jsonl").write_text(f"{json.dumps(sample)}\n" * 5)


@pytest.mark.parametrize(
    "change", [failed, another_loss, another_device, a_spike, infinite_telemetry, shutil.rmtree]
)
def test_a_changed_run_is_reported_as_its_files_are(
    study: Study, change: Callable[[Path], None]
) -> None:
    before = study.report()
    run = study.plan.runs[3].path
    intact = run.with_name(".intact")
    shutil.copytree(run, intact)
    try:
        change(run)
        time.sleep(TICK_SECONDS)
        assert study.report() != before
        in_each_way(study)
    finally:
        shutil.rmtree(run, ignore_errors=True)
        intact.rename(run)


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_run_is_reported_as_its_files_are(study: Study, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        run = chance.choice(study.plan.runs).path
        intact = run.with_name(".intact")
        shutil.copytree(run, intact)
        try:
            for _ in range(chance.randrange(1, 3)):
                name = chance.choice(sorted(path.name for path in intact.iterdir()))
                operations = mutations.draw(chance, intact / name)
                mutations.apply(run / name, operations, intact / "status.json")
            time.sleep(TICK_SECONDS * chance.randrange(2))
            in_each_way(study)
        finally:
            shutil.rmtree(run)
            intact.rename(run)


def test_only_a_changed_run_is_read_again(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[Path] = Counter()
    read = json_files.read_record

    def counted(path: Path, *arguments: object) -> bytes:
        reads[path] += 1
        return read(path, *arguments)

    time.sleep(TICK_SECONDS)
    expected = study.report(force=True)
    run = study.plan.runs[2].path
    (run / "logs.txt").touch()
    time.sleep(TICK_SECONDS)
    monkeypatch.setattr("lib.json_files.read_record", counted)
    assert study.report() == expected
    # The bins of a run that is shorter than the others depend on the others.
    shorter = study.plan.runs[-1].path
    assert {path.parent for path in reads if path.name == "metrics.jsonl"} == {run, shorter}
    assert {path.parent for path in reads if path.name == "manifest.json"} == {run}


def test_numbers_of_telemetry_that_overflow_do_not_prevent_the_report(study: Study) -> None:
    run = study.plan.runs[0].path
    before = (run / "telemetry.jsonl").read_bytes()
    infinite_telemetry(run)
    text = study.report()[0]
    (run / "telemetry.jsonl").write_bytes(before)
    assert json.loads(text)["rows"][0]["val_loss"] is not None
