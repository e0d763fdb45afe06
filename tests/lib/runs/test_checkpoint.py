"""Checkpoints: atomic writes, verification before loading, and survival of older checkpoints."""

import json
import os
from pathlib import Path

import pytest
import torch

from lib.errors import RunError
from lib.runs import checkpoint

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
STATE = {"step": 3, "moments": [torch.full((5,), 0.5)], "nested": {"none": None, "pair": (1, "x")}}


def save(folder, step, keep=2):
    checkpoint.save_checkpoint(folder, step, WEIGHTS, STATE, keep)


def names(folder):
    return sorted(os.listdir(folder))


def load(folder, *expected):
    """Return the latest checkpoint; its warnings have, in order, each of these texts."""
    warnings = []
    found = checkpoint.load_latest_checkpoint(folder, warnings.append)
    assert len(warnings) == bool(expected) and all(text in warnings[0] for text in expected)
    return found


def test_what_is_saved_is_loaded(tmp_path):
    folder = tmp_path / "checkpoints"
    assert load(folder) is None
    save(folder, 3)
    found = load(folder)
    assert found.step == 3
    assert checkpoint.weights_digest(found.weights) == checkpoint.weights_digest(WEIGHTS)
    assert checkpoint.state_digest(found.state) == checkpoint.state_digest(STATE)
    record = json.loads((folder / "step-00000003" / "digests.json").read_text())
    for name, facts in record["files"].items():
        assert facts["bytes"] == (folder / "step-00000003" / name).stat().st_size
    # A leftover is no checkpoint, and goes with the next.
    (folder / ".tmp-step-00000004").mkdir()
    (folder / ".tmp-step-00000004" / "state.pt").write_bytes(b"half")
    assert load(folder).step == 3
    save(folder, 5)
    assert names(folder) == ["step-00000003", "step-00000005"]


def test_the_newest_are_kept_and_a_step_saved_again_replaces_itself(tmp_path):
    for step in (2, 10, 9, 100_000_000):
        save(tmp_path, step, keep=2)
    checkpoint.save_checkpoint(tmp_path, 100_000_000, {"a": torch.zeros(1)}, {}, 2)
    assert names(tmp_path) == ["step-00000010", "step-100000000"]
    newest = load(tmp_path)
    assert newest.step == 100_000_000 and newest.weights["a"].shape == (1,)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "digests.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_seen_and_the_one_before_taken(tmp_path, name, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= damage == "flip"
    path.unlink()
    if damage != "remove":
        path.write_bytes(data[: -20 if damage == "cut" else None])
    assert load(tmp_path, "step-00000002", name).step == 1
    assert names(tmp_path) == ["damaged-step-00000002", "step-00000001"]


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("torch.save", RuntimeError("[enforce fail] unexpected pos 64 vs 0")),
        ("safetensors.torch.save", OSError(28, "No space left on device")),
        ("lib.runs.checkpoint.write_json", OSError(122, "Disk quota exceeded")),
    ],
)
def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path, monkeypatch, target, error):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def fail(*arguments):
        raise error

    monkeypatch.setattr(target, fail)
    with pytest.raises(RunError) as raised:
        save(tmp_path, 3)
    assert raised.value.codes == ["checkpoint.write-failed"]
    assert "step 3" in str(raised.value) and str(error).split("] ")[-1] in str(raised.value)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load(tmp_path).step == 2


def test_the_old_one_stays_when_the_new_one_is_bad_on_the_disk(tmp_path, monkeypatch):
    """The disk stores other bytes than the ones written."""
    save(tmp_path, 1, keep=1)
    rename = os.rename

    def corrupting(source, target):
        if Path(source).name.startswith(".tmp-step-00000002"):
            (Path(source) / "state.pt").write_bytes(b"other")
        rename(source, target)

    monkeypatch.setattr("os.rename", corrupting)
    with pytest.raises(RunError) as raised:
        save(tmp_path, 2, keep=1)
    assert raised.value.codes == ["checkpoint.damaged"] and "state.pt" in str(raised.value)
    assert load(tmp_path, "step-00000002").step == 1


def test_a_state_that_runs_code_is_not_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    checkpoint.save_checkpoint(tmp_path / "c", 1, WEIGHTS, {"trap": Trap()}, 2)
    assert load(tmp_path / "c", "step-00000001") is None
    assert names(tmp_path / "c") == ["damaged-step-00000001"]
    assert not (tmp_path / "sprung").exists()
