"""docs/results.md documents every file and field of a real run and the tables of its study."""

import csv
import json
import re

from lib.project import ROOT
from lib.runs.manifest import VARIABLES
from tests.integration.conftest import TRAINED

# The generators in rng_state_at_start and rng_state_at_end.
GENERATORS = {"torch", "numpy", "python", "cuda"}
PAGE = (ROOT / "docs" / "results.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))


def named(title):
    """Return the names in the code spans of a section."""
    return set(re.findall(r"`([^`\n]+)`", SECTIONS[title]))


def first_column(title):
    """Return the names in the first column of a section's table."""
    cells = re.findall(r"^\| (`.+?`) \|", SECTIONS[title], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def strict(text):
    """Parse strict JSON: no NaN, no infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path):
    return [strict(line) for line in path.read_text().splitlines()]


def test_every_file_and_field_of_a_run_is_in_the_page(trained):
    (run,) = trained.runs("0")
    names = (re.sub(r"rank\d+", "rank*", path.name) for path in run.iterdir())
    files = {re.sub(r"^\.lease-\d+$", ".lease-N", name) for name in names}
    # Checkpoints exist while a run is active, code.diff for uncommitted code, failure files after a
    # failure, and the others on request.
    sometimes = {"checkpoints", "code.diff", "export", "evaluations", "overcome"}
    sometimes |= {"numerics_failure.json", "numerics_failure.safetensors"}
    assert first_column("A run's folder") == files | sometimes

    for path in [p for p in run.iterdir() if p.suffix in (".json", ".jsonl", ".yaml")]:
        assert lines(path) if path.suffix == ".jsonl" else strict(path.read_text())

    common = {"schema_version"}
    status = json.loads((run / "status.json").read_text())
    assert first_column("`status.json`") == status.keys() - common
    summary = json.loads((run / "summary.json").read_text())
    groups = {k: v for k, v in summary.items() if isinstance(v, dict)}
    fields = {f"{group}.{name}" for group, found in groups.items() for name in found}
    assert first_column("`summary.json`") == fields | summary.keys() - groups.keys() - common

    rows = named("Rows")
    assert set(next(csv.reader((run / "per_query.csv").open()))) <= rows
    for name in ("metrics.jsonl", "timing.jsonl", "heartbeat_rank0.jsonl", "telemetry.jsonl"):
        assert {key for row in lines(run / name) for key in row} <= rows
    kinds = {row["kind"] for row in lines(run / "metrics.jsonl")}
    assert kinds == {"train", "statistics", "eval"}

    title = "`resolved_config.yaml` and `manifest.json`"
    resolved = json.loads((run / "resolved_config.yaml").read_text())
    manifest = json.loads((run / "manifest.json").read_text())
    assert resolved.keys() - common <= named(title)
    assert first_column(title) - {"manifest.json"} == manifest.keys() - common
    # Groups with arbitrary keys, such as file names.
    open_ended = {"artifacts"}
    for group, found in manifest.items():
        if isinstance(found, dict) and group not in open_ended:
            assert found.keys() <= named(title) | set(VARIABLES) | GENERATORS, group
    assert manifest["rng"]["streams"].keys() <= named(title)
    assert {key for row in manifest["volatile"]["attempts"] for key in row} <= named(title)
    assert {key for found in resolved["settings"].values() for key in found} <= named(title) | {
        "value"
    }
    assert {key for knob in manifest["knobs"].values() for key in knob} <= named(title)
    assert {key for found in manifest["artifacts"].values() for key in found} <= named(title)

    study = run.parent
    runs = {path.name for path in trained.runs(TRAINED)}
    assert {path.name for path in study.iterdir()} - runs <= named("A study's folder")
    columns = next(csv.reader((study / "table.csv").open()))
    assert set(columns) == first_column("A study's folder")
    code, text, _ = trained.command("report", JSON="1")
    assert code == 0 and json.loads(text).keys() <= named("A study's folder") | common
