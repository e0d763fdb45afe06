"""Explanation of a setting of a finished run."""

import json
from pathlib import Path

import pytest

from gpt2.records.run_files import explain_setting
from lib.config.dotconfig import ConfigWorkspace
from lib.errors import ConfigError
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, reseal, write_run


@pytest.fixture
def place(tmp_path: Path) -> ConfigWorkspace:
    """Return a build folder whose only run asked for bf16 and was computed in fp32."""
    manifest = changed(MANIFEST, knobs__precision_mode__requested="bf16")
    symbols = {"PRECISION": "bf16", "DROPOUT": "0.1", "BATCH_SIZE": 4, "COMPILE": False}
    run = write_run(tmp_path / "run", manifest=manifest, symbols=symbols)
    origin = {"label": "command line", "value": "bf16", "where": "SET"}
    _write_settings(run, {"PRECISION": origin})
    return ConfigWorkspace(ROOT, tmp_path)


def _write_settings(run: RunDir, settings: dict) -> None:
    record = json.loads(run.resolved_config.read_text())
    run.resolved_config.write_text(json.dumps({**record, "settings": settings}))
    reseal(run)


def test_a_value_is_followed_from_its_source_to_its_observation(place: ConfigWorkspace) -> None:
    run = str(place.build / "run")
    found = json.loads(explain_setting(place, "PRECISION", run, json=True))
    assert (found["value"], found["run"]) == ("bf16", run)
    assert found["origin"] == {"label": "command line", "where": "SET"}
    assert found["observed"]["precision_mode"]["observed"] == "fp32"
    # The run fell back to a smaller batch.
    batch = json.loads(explain_setting(place, "CONFIG_BATCH_SIZE", run, json=True))
    assert (batch["value"], batch["observed"]) == (4, {"batch.micro_batch": 2})
    dropout = json.loads(explain_setting(place, "DROPOUT", run, json=True))
    assert (dropout["origin"]["label"], dropout["observed"]) == ("default", {})


def test_the_explanation_fits_80_columns(place: ConfigWorkspace) -> None:
    lines = explain_setting(place, "PRECISION", str(place.build / "run"), json=False).splitlines()
    assert lines[0] == "PRECISION = bf16" and max(map(len, lines[2:])) <= 80
    assert any('requested "bf16"' in line and 'observed "fp32"' in line for line in lines)
    assert (
        explain_setting(place, "COMPILE", str(place.build / "run"), json=False)[:11]
        == "COMPILE = n"
    )


@pytest.mark.parametrize(
    ("sym", "options", "code", "where"),
    [
        ("", {}, "usage.missing-argument", "SYM"),
        ("PRECISON", {}, "config.unknown-symbol", "PRECISON"),
        ("DROPOUT=0.2", {}, "usage.conflict", "SYM"),
        ("DROPOUT", {"set": "DROPOUT=0.2"}, "usage.conflict", "SET"),
    ],
)
def test_a_question_that_no_run_answers(
    place: ConfigWorkspace, sym: str, options: dict, code: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_setting(place, sym, str(place.build / "run"), json=False, **options)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == (code, where)
