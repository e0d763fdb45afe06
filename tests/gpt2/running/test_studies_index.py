"""The index of a results folder: each study judged on the runs that are there now."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2.records.files import write_resolved_config
from gpt2.running.results import judged_document, write_results
from gpt2.running.studies_index import write_index
from gpt2.study.plan import Plan, config_layers, make_plan
from lib.config.dotconfig import ConfigWorkspace, explicit_settings
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, seal
from tests.lib.report.fabricated_study import write_planned
from tests.lib.report.web_page import Parsed

FIRST = {**SMALL, "RA_MLA_ABLATION_STEPS": "0,ra", "VERDICT_AA": False}
OTHER = {**FIRST, "MAX_ITERS": 5, "ABLATION_STUDY_MECHANISMS": True, "RA_MLA_ABLATION_STEPS": "0,1"}


def configured(build: Path, settings: dict[str, Any]) -> Plan:
    write_build(build, settings)
    return make_plan(config_layers(build), build, seeds="1-3")


def trained(build: Path, settings: dict[str, Any]) -> Plan:
    """Write fabricated results of all runs of the settings."""
    plan = configured(build, settings)
    place = ConfigWorkspace(ROOT, build)
    for run in plan.runs:
        if run.path.exists():
            continue
        write_planned(run, 12, 3, symbols=run.config.values)
        sources = explicit_settings(place.config, run.config.values, run.label)
        RunDir(run.path).resolved_config.unlink()
        write_resolved_config(RunDir(run.path), run.config, sources)
        seal(RunDir(run.path), MANIFEST)
    return plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    build = tmp_path_factory.mktemp("build")
    for settings in (OTHER, FIRST):
        plan = trained(build, settings)
        write_results(plan).publish()
    return build


@pytest.fixture
def build(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "build"))


@functools.cache
def first(build: Path) -> tuple[Plan, Any]:
    plan = configured(build, FIRST)
    return plan, judged_document(plan)


def index(build: Path) -> dict[str, dict[str, str]]:
    """Write the index beside .config's study. Return its rows by study."""
    write_index(*first(build), judged_document)
    (rows,) = Parsed((build / "results/index.html").read_text()).tables.values()
    return {row["study"]: row for row in rows}


@pytest.mark.slow
def test_each_study_has_the_answer_that_its_report_has(build):
    rows = index(build)
    # The latest first.
    assert list(rows) == ["ratio", "mechanisms"]
    assert {row["runs done"] for row in rows.values()} == {"6 of 6"}
    page = (build / "results/index.html").read_text()
    # The same runs give the same bytes.
    index(build)
    assert (build / "results/index.html").read_text() == page
    for study in rows:
        shown = Parsed((build / "results" / study / "report.html").read_text())
        assert rows[study]["answer"].startswith(shown.answer) and "n=3" in shown.answer
        word = rows[study]["best word"]
        assert word.split()[0] in ("BETTER", "INCONCLUSIVE", "WORSE")
        assert shown.words[0] in word and f'href="{study}/report.html"' in page


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_no_word_of_a_stored_document_is_taken_and_a_listed_study_is_not_written(build):
    folder = build / "results/mechanisms"
    assert index(build)["mechanisms"]["best word"] != ""
    # The word follows the runs, and the report of before is no source.
    for run in folder.glob("*-s3-*"):
        shutil.rmtree(run)
    before = files(folder)
    row = index(build)["mechanisms"]
    assert row["best word"] == "" and row["runs done"].startswith("4")
    # Above all, no look is declared for it.
    assert files(folder) == before
    (folder / "report.html").unlink()
    index(build)
    assert "mechanisms/report.html" not in (build / "results/index.html").read_text()


@pytest.mark.slow
def test_a_matrix_and_a_single_training_are_judged_too(build):
    modes = ("RA_MLA_ABLATION_MODE", "RA_MLA_ABLATION_STEPS", "VERDICT_AA")
    alone = {name: value for name, value in FIRST.items() if name not in modes}
    axes = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "DROPOUT=0.0,0.2"}
    write_results(trained(build, {**alone, **axes}))
    trained(build, {**alone, "SINGLE_TRAINING": True, "MAX_ITERS": 3})
    rows = index(build)
    assert rows["matrix"]["answer"].startswith("dropout-0.2 is ")
    assert rows["matrix"]["runs done"] == "6 of 6" and rows["matrix"]["best word"]
    assert "nothing is compared" in rows["single"]["answer"]
    assert rows["single"]["runs done"] == "3 of 3" and rows["single"]["best word"] == ""


MATRIX = f"N_LAYER={','.join(map(str, range(1, 90)))} MAX_ITERS={','.join(map(str, range(1, 90)))}"
AS_MATRIX = {"RUN_MODE": "test_matrix_mode", "ABLATION_STUDY": ""}
NO_STUDY = dict.fromkeys(("MAX_ITERS", "ABLATION_STUDY", "RA_MLA_ABLATION_STEPS"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "symbols", "expected", "done"),
    [
        ({"NO_SUCH_SYMBOL": "y"}, {}, "Not judged by this code, from gqa-s3-", "6"),
        ({"ABLATION_STUDY_FILE": "/etc/passwd"}, {}, "ABLATION_STUDY_FILE=/etc/passwd: see", "6"),
        ({"MAX_ITERS": "6"}, {}, "No run has a result yet.", "0 of 2"),
        # The plan is that of the runs that are there, of which the edited one is damaged.
        ({"SEED_LIST": ",".join(map(str, range(1, 50_000)))}, {}, "n=2: no verdict", "5 of 6"),
        # No question on a terminal.
        ({**NO_STUDY, "TEST_MATRIX_AXES": MATRIX}, AS_MATRIX, "Not judged by this code", "6"),
    ],
)
def test_edited_settings_of_a_run_ask_nothing_and_are_a_row_with_the_reason(
    build, monkeypatch, settings, symbols, expected, done
):
    (file,) = (build / "results/mechanisms").glob("gqa-s3-*/resolved_config.yaml")
    record = json.loads(file.read_text())
    for name, value in settings.items():
        record["settings"][name] = {"value": value, "label": "config", "where": ".config:1"}
        if value is None:
            del record["settings"][name]
    record["symbols"] |= symbols
    file.write_text(json.dumps(record))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    rows = index(build)
    assert rows["mechanisms"]["answer"].startswith(expected)
    assert (rows["mechanisms"]["best word"], rows["mechanisms"]["runs done"]) == ("", done)
    assert rows["ratio"]["runs done"] == "6 of 6"


@pytest.mark.slow
def test_foreign_and_damaged_folders_are_no_markup_and_no_failure(build, tmp_path):
    results = build / "results"
    hostile = results / "<i>a&b"
    shutil.copytree(results / "mechanisms", hostile)
    for run in hostile.glob("gqa-*"):
        (run / "resolved_config.yaml").write_text("{")
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**status, "written_at": 1e300}))
    # Without a report, the name is no link.
    shutil.copytree(hostile, results / "<i>c")
    (results / "<i>c/report.html").unlink()
    (results / "link").symlink_to(results / "mechanisms")
    (results / "empty").mkdir()
    (results / "file").write_text("")
    outside = tmp_path / "outside.html"
    outside.write_text("kept")
    (results / "index.html").unlink()
    (results / "index.html").symlink_to(outside)
    rows = index(build)
    page = (results / "index.html").read_text()
    assert rows.keys() == {"ratio", "mechanisms", "<i>a&b", "<i>c"}
    assert "<i>" not in page and rows["<i>a&b"]["date"] == ""
    assert outside.read_text() == "kept" and not (results / "index.html").is_symlink()
