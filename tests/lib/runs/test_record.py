"""The typed reader of a run directory: absent, damaged and partial files are told apart."""

import json

import pytest

from lib.errors import EXIT_FAILED
from lib.files import sha256_file
from lib.json_files import DamagedRecord
from lib.runs.lease import take_lease
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.rows import EvalRow, RowTail, StatisticsRow, TrainRow
from lib.runs.run_dir import RunDir, RunStatus, State, read_status, write_status
from tests.lib.fabricated import MANIFEST, changed, complete, write_run

TRAIN = {"kind": "train", "iteration": 1, "tokens": 8, "loss": 2, "lr": 0.1, "grad_norm": None}


def test_a_finished_run_is_read_with_types(tmp_path):
    record = RunRecord(write_run(tmp_path / "run"))
    assert record.status is not None and record.status.state is State.SUCCESS
    assert record.code.dirty_tree is False and record.hardware.gpu_name is None
    assert record.manifest.value(int, "processes", "world_size") == 1
    assert record.final.tokens == 2048 and record.timing.train_seconds == 61.0
    assert record.symbols == {"SEED": 1}
    assert [document.item_id for document in record.documents] == ["x", "y"]
    assert record.artifacts["metrics.jsonl"].sha256 == sha256_file(record.run.metrics)
    # A file is read once.
    first = record.summary
    record.run.summary.unlink()
    assert record.summary is first


def test_a_field_is_checked_when_it_is_read(tmp_path):
    sources = {"gpt2/model.py": "a" * 64, "gpt2/train.py": None}
    changes = {"origin__torch": 3, "origin__sources": sources, "code": ...}
    run = RunRecord(write_run(tmp_path / "run", manifest=changed(MANIFEST, **changes)))
    manifest = run.manifest
    assert manifest.value(int, "processes", "world_size") == 1
    assert (manifest.find("code", "git_sha"), manifest.find("origin", "torch")) == (UNKNOWN, 3)
    for read, expected in (
        (lambda: manifest.value(str, "origin", "torch"), "origin.torch"),
        (lambda: run.code, "a field code"),
        (lambda: run.sources, "origin.sources"),
    ):
        with pytest.raises(DamagedRecord) as caught:
            read()
        assert expected in caught.value.expected


def test_rows_have_the_type_of_their_kind(tmp_path):
    run = RunDir(tmp_path)
    rows = [
        TRAIN,
        {"kind": "statistics", "iteration": 1, "values": {"a": [1.0, None]}, "tokens": 8},
        {"kind": "eval", "iteration": 1, "tokens": 8, "val_loss": 2.5, "sparsity": 0},
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunRecord(run).metrics == [
        TrainRow(1, 8, 2, 0.1, None),
        StatisticsRow(1, {"a": [1.0, None]}),
        EvalRow(1, 8, 2.5, 0),
    ]


@pytest.mark.parametrize(
    "row", ["{", "[]", '{"kind": "other"}', json.dumps({**TRAIN, "loss": "2"}), '{"kind": "train"}']
)
def test_a_damaged_row_is_named_with_its_line(tmp_path, row):
    """Also one of a growing file. That each row comes once: tests/lib/tracking/test_feed.py."""
    run, line = RunDir(tmp_path), json.dumps(TRAIN) + "\n"
    growing, after = RowTail(run.metrics), RowTail(run.metrics, 2)
    run.metrics.write_text(line * 2)
    assert len(growing.metrics()) == 2
    run.metrics.write_text(f"{line * 2}{row}\n")
    for read in (lambda: RunRecord(run).metrics, growing.metrics, after.metrics):
        with pytest.raises(DamagedRecord) as caught:
            read()
        assert (caught.value.file, caught.value.line) == (run.metrics, 3)


def test_an_incomplete_last_line_is_damage_only_after_the_end(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"a": 1}\n{"a": 2')
    assert RunRecord(run).metrics_fields == [{"a": 1}]
    write_status(run, RunStatus(State.SUCCESS))
    with pytest.raises(DamagedRecord):
        _ = RunRecord(run).metrics_fields


@pytest.mark.parametrize(
    ("state", "word"),
    [
        # Without the files of a result.
        (State.SUCCESS, "damaged"),
        (State.FAILED, "failed"),
        (State.INTERRUPTED, "interrupted"),
        # No process trains it.
        (State.RUNNING, "interrupted"),
        (State.INVALID, "failed"),
    ],
)
def test_the_state_of_a_run_is_one_word(tmp_path, state, word):
    run = RunDir(tmp_path)
    write_status(run, RunStatus(state, 1, "loss is nan\nat step 3"))
    record = RunRecord(run)
    assert (record.state, record.is_done) == (word, False) and record.unfinished is not None
    complete(run)
    record = RunRecord(run)
    assert (record.state, record.damage, record.unfinished) == ("done", "", None)


def test_a_run_that_is_trained_is_running_and_one_without_a_status_is_new(tmp_path):
    run = RunDir(tmp_path / "a-s1-00000000")
    assert RunRecord(run).state == "new"
    run.path.mkdir()
    with take_lease(run, 60):
        write_status(run, RunStatus(State.RUNNING))
        assert RunRecord(run).state == "running"
    aside = run.path.rename(run.replaced("20260101-000000"))
    assert RunRecord(RunDir(aside)).state == "replaced"


@pytest.fixture
def ended(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    write_status(run, RunStatus(State.SUCCESS, 0, "", 12, 12))
    return run


def test_a_status_with_any_damaged_byte_is_success_or_damaged(ended):
    """A flipped bit of a value may leave a valid status; it never makes the run a new one."""
    whole = ended.status.read_bytes()
    for position, byte in enumerate(whole):
        ended.status.write_bytes(whole[:position] + bytes([byte ^ 1]) + whole[position + 1 :])
        assert read_status(ended).state in (State.SUCCESS, State.DAMAGED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("state", "DONE"), ("state", "DAMAGED"), ("iteration", "12"), ("schema_version", 2)),
        *(("Iteration", 12), ("exit_code", ...), ("schema_version", ...)),
    ],
)
def test_a_missing_field_and_one_of_another_type_are_damage(ended, name, value):
    """Types of fields: tests of lib.json_files."""
    content = json.loads(ended.status.read_text()) | {name: value}
    ended.status.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    found = read_status(ended)
    assert (found.state, found.exit_code) == (State.DAMAGED, EXIT_FAILED)
    assert found.message.startswith("status.json: ") and name in found.message


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "per_query.csv"])
def test_results_without_a_status_are_damage(ended, name):
    ended.status.unlink()
    (ended.path / name).write_text("result")
    found = read_status(ended)
    assert found.state is State.DAMAGED and name in found.message
