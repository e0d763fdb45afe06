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


def test_a_status_with_any_damaged_byte_is_success_or_damaged(run: RunDir) -> None:
    """A flipped bit of a value may leave a valid status; it never makes the run a new one."""
    whole = run.status.read_bytes()
    for position in range(len(whole)):
        run.status.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        found = read_status(run)
        assert found is not None and found.state in (State.SUCCESS, State.DAMAGED)


DAMAGES = [("state", "DONE"), ("state", "DAMAGED"), ("iteration", "12"), ("schema_version", 2)]


@pytest.mark.parametrize(
    ("name", "value"), [*DAMAGES, ("Iteration", 12), ("exit_code", ...), ("schema_version", ...)]
)
def test_a_missing_field_and_one_of_another_type_are_damage(
    run: RunDir, name: str, value: object
) -> None:
    """Types of fields: tests of lib.json_files."""
    content: dict[str, object] = json.loads(run.status.read_text()) | {name: value}
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
