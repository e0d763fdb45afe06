"""The list of all runs below the results folder, its conditions, and the removal of runs."""

import json
import re
import shutil
from pathlib import Path

import pytest

from gpt2.records.listing import (
    list_runs,
    listed_runs,
    read_runs,
    remove_runs,
    select,
    to_json,
    to_text,
)
from lib.env.gpu import cpu_model
from lib.errors import ConfigError
from lib.files import write_json
from lib.project import ROOT
from lib.runs.code import installed_torch
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import IDENTITY, MANIFEST, changed, seal, write_run

PAGE = ROOT / "docs" / "results.md"
CURRENT = changed(
    MANIFEST,
    origin={"torch": installed_torch(), "device": cpu_model(), "sources": {}},
    run={"run_id": "r1"},
)


def add(folder, name, manifest=CURRENT, loss=2.0, **symbols):
    """Write a finished run; return its directory."""
    run = write_run(folder / name, manifest=manifest, final={"val_loss": loss})
    record = {
        "hash8": name[-8:],
        "identity": IDENTITY,
        "symbols": {"SEED": int(name.split("-s")[1][0]), "DEVICE": "cpu", **symbols},
    }
    write_json(run.resolved_config, record)
    seal(run, manifest)
    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two studies with a run in every state, and a replaced one."""
    folder = tmp_path_factory.mktemp("listed") / "results"
    first = {
        "N_LAYER": 4,
        "DROPOUT": "0.1",
        "COMPILE": False,
        "JOBS": 1,
        "RECIPROCAL_ALPHA": "",
        "INIT_FROM": "",
    }
    second = {**first, "DROPOUT": "0.10", "COMPILE": True, "JOBS": 2, "RECIPROCAL_ALPHA": "0.3"}
    third = {"INIT_FROM": "run:base-s1", "N_LAYER": 6, "DROPOUT": "0.2", "COMPILE": True}
    add(folder, "ratio/base-s1-aaaaaaaa", **first)
    add(folder, "ratio/base-s2-aaaaaaab", loss=1.5, **second)
    add(folder, "single/run-s1-bbbbbbbb", MANIFEST, loss=3.0, **third)
    add(folder, "ratio/base-s1-aaaaaaaa.old-20260101-000000")
    broken = add(folder, "ratio/ra-s1-cccccccc")
    broken.summary.write_text("{")
    for name, state in (("a", State.RUNNING), ("b", State.FAILED), ("c", State.INTERRUPTED)):
        run = RunDir(folder / f"ratio/{name}-s1-dddddddd")
        run.path.mkdir()
        write_status(run, RunStatus(state, message="loss is not finite", iteration=7))
    (folder / "ratio/d-s3-eeeeeeee").mkdir()
    (folder / "ratio/figures").mkdir()
    return folder


@pytest.fixture(scope="module")
def listed(results):
    return listed_runs(results)


def test_every_run_of_every_study_is_a_row_with_its_state(listed):
    assert {run["run"]: run["state"] for run in listed["runs"]} == {
        "ratio/base-s1-aaaaaaaa": "done",
        "ratio/base-s2-aaaaaaab": "done",
        "ratio/ra-s1-cccccccc": "damaged",
        "ratio/a-s1-dddddddd": "interrupted",
        "ratio/b-s1-dddddddd": "failed",
        "ratio/c-s1-dddddddd": "interrupted",
        "ratio/d-s3-eeeeeeee": "new",
        "single/run-s1-bbbbbbbb": "stale",
    }
    assert listed["replaced"] == 1


def test_a_row_has_the_facts_of_its_run(listed):
    run = next(run for run in listed["runs"] if run["run"] == "ratio/base-s2-aaaaaaab")
    facts = {name: run[name] for name in ("step", "seed", "val_loss", "hash8", "commit", "run_id")}
    assert list(facts.values()) == ["base", 2, 1.5, "aaaaaaab", "0" * 40, "r1"]
    assert run["ended_at"] is not None
    broken = next(run for run in listed["runs"] if run["state"] == "damaged")
    assert "summary.json" in broken["problem"] and broken["val_loss"] is None
    assert broken["problem"] in to_text(listed).replace("\n  ", " ")
    # Settings of equal value, and those without effect, are not listed.
    assert listed["differing"] == {
        "COMPILE": ["n", "y"],
        "DROPOUT": ["0.1", "0.10", "0.2"],
        "INIT_FROM": ["-", "run:base-s1"],
        "N_LAYER": ["4", "6"],
    }
    document = json.loads(to_json(listed))
    assert [run["run"] for run in document["runs"]] == [run["run"] for run in listed["runs"]]
    first = next(run for run in document["runs"] if run["step"] == "base")
    assert first["settings"] == {"COMPILE": False, "DROPOUT": "0.1", "INIT_FROM": "", "N_LAYER": 4}
    assert document["replaced"] == 1 and document["differing"] == [*listed["differing"]]


def test_the_runs_of_a_cause_are_one_entry_and_json_has_all():
    (new,) = read_runs([Path("s/a-s1-aaaaaaaa")])
    equal = [{**new, "state": "damaged", "problem": "no hash"} for _ in range(200)]
    distinct = [{**new, "state": "failed", "problem": f"cause {n}."} for n in range(30)]
    listed = {"folder": "", "differing": {}, "replaced": 0, "runs": [*equal, *distinct]}
    shown, full = (to_text(listed, every_column=every) for every in (False, True))
    assert shown.count("no hash") == full.count("no hash") == 1 and " 197 " in shown
    assert len(shown.splitlines()) < len(listed["runs"]) + 25
    assert "cause 9." not in shown and all(f"cause {n}." in full for n in range(30))
    problems = [run["problem"] for run in json.loads(to_json(listed))["runs"]]
    assert problems == [run["problem"] for run in listed["runs"]]


@pytest.mark.parametrize(
    "damage",
    ['{"written_at": 1e300, "state": "SUCCESS"}', '{"state": "GREAT"}', "\udcff"],
)
def test_a_damaged_status_is_a_row(tmp_path, damage):
    run = add(tmp_path, "ratio/x-s1-aaaaaaaa")
    run.status.write_text(damage, errors="surrogateescape")
    (row,) = list_runs(tmp_path)
    assert row["state"] == "damaged" and "status.json" in row["problem"]


RUN, BASE, AGAIN = "run-s1-bbbbbbbb", "base-s1-aaaaaaaa", "base-s2-aaaaaaab"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("N_LAYER=6", [RUN]),
        ("N_LAYER!=6", [BASE, AGAIN]),
        ("DROPOUT=.1 val_loss<2", [AGAIN]),
        ("val_loss<=2", [BASE, AGAIN]),
        ("val_loss>2", [RUN]),
        ("COMPILE=y state=done", [AGAIN]),
        ("seed>=3", ["d-s3-eeeeeeee"]),
        ("hash=aaaaaaa seed=1", [BASE]),
        ("study!=ratio", [RUN]),
        ("finished<2026 study=single", []),
        ("finished>=1971 commit=0000 study=single", [RUN]),
    ],
)
def test_conditions_select_runs(listed, where, expected):
    selected = [run["run"].partition("/")[2] for run in select(listed["runs"], where)]
    assert selected == expected and select(listed["runs"], "") == listed["runs"]


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("N_LAYR=6", "unknown field 'N_LAYR'; nearest: N_LAYER"),
        ("val_los<2", "val_loss"),
        ("n_layer=6", "N_LAYER"),
        ("__class__=1", "unknown field"),
        *(
            (text, text.split()[0])
            for text in ("N_LAYER==6", "N_LAYER=6,val_loss<2", "N_LAYER = 6")
        ),
        ("N_LAYER", ""),
        ("val_loss<low", "number"),
        ("N_LAYER=six", "number"),
        ("state=dne", "done"),
        ("state<3", "unknown state"),
        ("finished>today", "day"),
        ("run=ratio/*", "*"),
        ("state='done'", "quotes"),
    ],
)
def test_an_invalid_condition_is_one_error(listed, where, hint):
    with pytest.raises(ConfigError) as caught:
        select(listed["runs"], where)
    (problem,) = caught.value.problems
    unknown = problem.what.startswith("unknown field")
    assert problem.code == f"usage.{'unknown-field' if unknown else 'invalid-condition'}"
    assert hint in problem.what and problem.where == "WHERE"


def test_the_list_fits_80_columns_and_v1_shows_every_setting(listed, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, to_text(listed).splitlines())) <= 80
    header = to_text(listed, every_column=True).splitlines()[0].split()
    assert {"commit", "hash", "step", "seed", "COMPILE", "DROPOUT", "N_LAYER"} <= set(header)
    # The setting that a condition names is shown first, then the one with most values.
    for where, first in (("", "DROPOUT"), ("N_LAYER=4", "N_LAYER")):
        assert to_text(listed, where).splitlines()[0].split()[4] == first
    none = listed_runs(tmp_path / "none", "N_LAYER=6")
    assert none["runs"] == [] and "".join(to_text(none).split()).endswith(f"{tmp_path}/none")


def test_the_documented_lines_load_a_results_folder_into_a_table(results, monkeypatch, capsys):
    pytest.importorskip("pandas")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(results.parent)
    names = {}
    exec(code, names)
    done = names["done"]
    assert list(done["val_loss"]) == [2.0, 1.5] and list(done["seed"]) == [1, 2]
    assert "N_LAYER" in capsys.readouterr().out


# Removal.


@pytest.fixture
def folder(results, tmp_path):
    """Return a copy of the results, whose runs may be removed."""
    return shutil.copytree(results, tmp_path / "results")


def test_selected_runs_are_removed_and_no_others(folder):
    names = {path.name for path in (folder / "ratio").iterdir()}
    for where, removed in (
        ("state=failed", {"b-s1-dddddddd"}),
        ("state=replaced", {"base-s1-aaaaaaaa.old-20260101-000000"}),
        ("step=base state=done", {BASE, AGAIN}),
    ):
        assert remove_runs(select(list_runs(folder), where), folder) == []
        names -= removed
        assert {path.name for path in (folder / "ratio").iterdir()} == names


def test_a_locked_run_and_a_link_stay(folder, tmp_path):
    outside = write_run(tmp_path / "elsewhere" / "x-s1-eeeeeeee").path
    (folder / "ratio" / "x-s1-eeeeeeee").symlink_to(outside)
    held = folder / "ratio" / "ra-s1-cccccccc"
    with take_lease(RunDir(held), DEFAULT_SECONDS):
        reasons = remove_runs(list_runs(folder), folder)
    names = ["ratio/ra-s1-cccccccc", "ratio/x-s1-eeeeeeee"]
    assert [reason.partition(":")[0] for reason in reasons] == names
    assert held.is_dir() and outside.is_dir() and len(list_runs(folder)) == 2


def test_an_interrupted_removal_leaves_no_run(folder, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", interrupt)
        remove_runs(select(list_runs(folder), "state=failed"), folder)
    assert [run["state"] for run in list_runs(folder)].count("failed") == 0
    remove_runs([], folder)
    assert not list(folder.glob("*/.removed-*"))
