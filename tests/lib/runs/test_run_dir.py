"""The state of a run: an unreadable status is not an absent one."""

import json
from pathlib import Path

import pytest

from lib.errors import EXIT_FAILED
from lib.runs.run_dir import RunDir, RunStatus, State, read_status, write_status

STATUS = RunStatus(State.SUCCESS, 0, "", 12, 12)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    write_status(run, STATUS)
    return run


def record(run: RunDir) -> dict[str, object]:
    content: dict[str, object] = json.loads(run.status.read_text())
    return content


def test_a_status_is_read_as_written(run: RunDir) -> None:
    found = read_status(run)
    assert found is not None
    assert (found.state, found.iteration, found.iterations) == (State.SUCCESS, 12, 12)
    run.status.unlink()
    assert read_status(run) is None


def test_a_status_with_any_damaged_byte_is_success_or_damaged(run: RunDir) -> None:
    """A flipped bit of a value may leave a valid status; it never makes the run a new one."""
    whole = run.status.read_bytes()
    for position in range(len(whole)):
        run.status.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        found = read_status(run)
        assert found is not None and found.state in (State.SUCCESS, State.DAMAGED)


WRONG = {
    "state": "DONE",
    "iteration": "12",
    "exit_code": True,
    "message": 3,
    "schema_version": 2,
    "Iteration": 12,
}
MISSING = ("exit_code", "iteration", "iterations", "message", "schema_version", "written_at")


@pytest.mark.parametrize(
    ("name", "value"), [*WRONG.items(), ("state", "DAMAGED"), *((name, ...) for name in MISSING)]
)
def test_a_missing_field_and_one_of_another_type_are_damage(
    run: RunDir, name: str, value: object
) -> None:
    content = record(run) | {name: value}
    run.status.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    found = read_status(run)
    assert found is not None and (found.state, found.exit_code) == (State.DAMAGED, EXIT_FAILED)
    assert found.message.startswith("status.json: ") and name in found.message


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "per_query.csv"])
def test_results_without_a_status_are_damage(run: RunDir, name: str) -> None:
    run.status.unlink()
    (run.path / name).write_text("result")
    found = read_status(run)
    assert found is not None and found.state is State.DAMAGED and name in found.message
