"""The typed reader of a run directory: absent, damaged and partial files are told apart."""

import json

import pytest

from lib.errors import EXIT_FAILED
from lib.files import sha256_file
from lib.json_files import DamagedRecord
from lib.runs.lease import take_lease
from lib.runs.record import UNKNOWN, RunRecord, derived
from lib.runs.rows import EvalRow, RowTail, StatisticsRow, TrainRow
from lib.runs.run_dir import RunDir, RunStatus, State, read_status, write_status
from tests.lib.fabricated import MANIFEST, changed, complete, write_run

TRAIN = {"kind": "train", "iteration": 1, "tokens": 8, "loss": 2, "lr": 0.1, "grad_norm": None}


@pytest.fixture
def record(tmp_path) -> RunRecord:
    return RunRecord(write_run(tmp_path / "run"))


def test_a_finished_run_is_read_with_types(record):
    assert record.status is not None and record.status.state is State.SUCCESS
    assert record.code.dirty_tree is False and record.hardware.gpu_name is None
    assert record.manifest.value(int, "processes", "world_size") == 1
    assert record.final.tokens == 2048 and record.timing.train_seconds == 61.0
    assert record.symbols == {"SEED": 1}
    assert [document.item_id for document in record.documents] == ["x", "y"]
    digest = record.artifacts["metrics.jsonl"].sha256
    assert digest == sha256_file(record.run.metrics)
    # A file is read once.
    first = record.summary
    record.run.summary.unlink()
    assert record.summary is first


def test_a_field_is_checked_when_it_is_read(tmp_path):
    manifest = changed(MANIFEST, origin__torch=3, code=...)
    run = RunRecord(write_run(tmp_path / "run", manifest=manifest))
    assert run.manifest.value(int, "processes", "world_size") == 1
    assert (run.manifest.find("code", "git_sha"), run.manifest.find("origin", "torch")) == (
        UNKNOWN,
        3,
    )
    with pytest.raises(DamagedRecord) as caught:
        run.manifest.value(str, "origin", "torch")
    assert "origin.torch" in caught.value.expected
    with pytest.raises(DamagedRecord) as caught:
        _ = run.code
    assert caught.value.expected == "a field code"


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
    "row", ["{", '{"kind": "other"}', json.dumps({**TRAIN, "loss": "2"}), '{"kind": "train"}']
)
def test_a_damaged_row_is_named_with_its_line(tmp_path, row):
    run = RunDir(tmp_path)
    run.metrics.write_text(f"{json.dumps(TRAIN)}\n{row}\n")
    with pytest.raises(DamagedRecord) as caught:
        _ = RunRecord(run).metrics
    assert (caught.value.file, caught.value.line) == (run.metrics, 2)


def test_an_incomplete_last_line_is_damage_only_after_the_end(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"a": 1}\n{"a": 2')
    assert RunRecord(run).metrics_fields == [{"a": 1}]
    write_status(run, RunStatus(State.SUCCESS))
    with pytest.raises(DamagedRecord):
        _ = RunRecord(run).metrics_fields


@pytest.mark.parametrize("skip", [0, 3])
def test_a_damaged_row_of_a_growing_file_is_named_with_its_line(tmp_path, skip):
    """That each row comes once: tests/lib/tracking/test_feed.py."""
    run, line = RunDir(tmp_path), json.dumps(TRAIN) + "\n"
    tail = RowTail(run.metrics, skip)
    run.metrics.write_text(line * 2 * (not skip))
    assert len(tail.metrics()) == 2 * (not skip)
    run.metrics.write_text(f"{line * 3}[]\n")
    with pytest.raises(DamagedRecord) as caught:
        tail.metrics()
    assert caught.value.line == 4


@pytest.mark.parametrize("digest", [-1, None, []])
def test_sources_are_digests(tmp_path, digest):
    sources = {"gpt2/model.py": "a" * 64, "gpt2/train.py": digest}
    write_run(tmp_path / "run", manifest=changed(MANIFEST, origin__sources=sources))
    with pytest.raises(DamagedRecord, match=r"origin\.sources"):
        _ = RunRecord(RunDir(tmp_path / "run")).sources


def test_what_was_derived_stays_when_the_rows_are_forgotten(tmp_path):
    run = write_run(tmp_path / "run")
    record = RunRecord(run)
    count = derived(lambda record: len(record.train_rows))
    before = count(record)
    record.forget_rows()
    assert "metrics_fields" not in vars(record) and "train_rows" not in vars(record)
    run.metrics.write_text("")
    assert count(record) == before > 0


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
    aside = RunDir(run.replaced("20260101-000000"))
    run.path.rename(aside.path)
    assert RunRecord(aside).state == "replaced"


@pytest.fixture
def ended(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    write_status(run, RunStatus(State.SUCCESS, 0, "", 12, 12))
    return run


def test_a_status_with_any_damaged_byte_is_success_or_damaged(ended):
    """A flipped bit of a value may leave a valid status; it never makes the run a new one."""
    whole = ended.status.read_bytes()
    for position in range(len(whole)):
        ended.status.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        found = read_status(ended)
        assert found is not None and found.state in (State.SUCCESS, State.DAMAGED)


DAMAGES = [("state", "DONE"), ("state", "DAMAGED"), ("iteration", "12"), ("schema_version", 2)]


@pytest.mark.parametrize(
    ("name", "value"), [*DAMAGES, ("Iteration", 12), ("exit_code", ...), ("schema_version", ...)]
)
def test_a_missing_field_and_one_of_another_type_are_damage(ended, name, value):
    """Types of fields: tests of lib.json_files."""
    content = json.loads(ended.status.read_text()) | {name: value}
    ended.status.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    found = read_status(ended)
    assert found is not None and (found.state, found.exit_code) == (State.DAMAGED, EXIT_FAILED)
    assert found.message.startswith("status.json: ") and name in found.message


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "per_query.csv"])
def test_results_without_a_status_are_damage(ended, name):
    ended.status.unlink()
    (ended.path / name).write_text("result")
    found = read_status(ended)
    assert found is not None and found.state is State.DAMAGED and name in found.message
