"""A finished run is VALID; every kind of damage makes it INVALID and is listed."""

import json
import operator
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gpt2.config import Config
from gpt2.records.audit import audit, to_json, to_text
from lib.files import sha256_file, write_json
from lib.runs.manifest import finalize_run, write_manifest
from lib.runs.run_dir import RunDir, RunStatus, State
from tests.gpt2.training.conftest import Trainer

FIVE = ("summary.json", "per_query.csv", "manifest.json", "logs.txt", "resolved_config.yaml")
Change = Callable[[Any], None]


@pytest.fixture(scope="session")
def whole(
    configure: Callable[..., Config], build_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunDir:
    """A finished run with a snapshot of its environment and a difference of its code."""
    torch.set_num_threads(1)
    run = Trainer(build_dir, tmp_path_factory.mktemp("audited"))(configure()).files
    (run.path / "environment").mkdir(exist_ok=True)
    packages, diff = run.path / "environment" / "packages.txt", run.path / "code.diff"
    packages.write_text("torch==2.13.0\n")
    diff.write_text("--- a\n+++ b\n")
    manifest = json.loads(run.manifest.read_text())
    manifest["environment"]["snapshot"] = {packages.name: sha256_file(packages)}
    manifest["code"]["diff"] = {"file": diff.name, "sha256": sha256_file(diff)}
    write_manifest(run, manifest)
    return run


@pytest.fixture
def run(whole: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the run that a test may damage."""
    return RunDir(shutil.copytree(whole.path, tmp_path / "copy"))


def found(run: RunDir, build_dir: Path) -> str:
    """Return the findings of the audit, one per line."""
    return "\n".join(map(str, audit(run, build_dir).findings))


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replace the first match; there must be one."""
    text, count = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, pattern
    path.write_text(text)


def reseal(run: RunDir) -> None:
    """Recompute the digests, as a forger of results would."""
    finalize_run(run, RunStatus(State.SUCCESS))


def edit_json(run: RunDir, path: Path, change: Change) -> None:
    """Change one field and recompute every digest."""
    record = json.loads(path.read_text())
    change(record)
    if path == run.manifest:
        write_manifest(run, record)
    else:
        write_json(path, record)
        reseal(run)


def test_a_finished_run_is_valid(run, build_dir):
    verdict = audit(run, build_dir)
    assert (verdict.findings, verdict.notes) == ([], [])
    assert to_text([verdict]) == f"VALID   {run.path}\n"
    (document,) = json.loads(to_json([verdict]))["runs"]
    assert document["valid"] is True


def test_missing_data_skips_a_check_and_is_not_damage(run, tmp_path):
    verdict = audit(run, tmp_path)
    assert verdict.valid
    assert "evaluation documents: data set " in to_text([verdict])


def test_a_changed_byte_of_the_held_out_text_is_not_damage_of_the_run(run, build_dir, tmp_path):
    build = shutil.copytree(build_dir, tmp_path / "build")
    # Other tests prepare other data sets there.
    for shard in build.glob("data/**/val*.bin"):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    verdict = audit(run, build)
    assert verdict.valid
    (note,) = verdict.notes
    assert note.startswith("evaluation documents: damaged: SHA-256 mismatch")


def test_a_run_of_other_code_is_still_judged(run, build_dir, monkeypatch):
    monkeypatch.setattr("gpt2.records.audit.changed_since", lambda *recorded: ["gpt2/model.py"])
    verdict = audit(run, build_dir)
    assert verdict.valid and "made by other code (gpt2/model.py)" in to_text([verdict])


@pytest.mark.parametrize("name", (*FIVE, "metrics.jsonl", "model.safetensors", "timing.jsonl"))
def test_each_file_is_required(run, build_dir, name):
    (run.path / name).unlink()
    assert f"{name}: expected a file, found none" in found(run, build_dir)
    (run.path / name).touch()
    assert f"{name}: expected content, found 0 bytes" in found(run, build_dir)


EDITS: dict[str, tuple[str, str, str, str]] = {
    "rows are a placeholder": (
        "per_query.csv",
        r"(?s)\A.*\Z",
        "note,placeholder\n",
        "found note,placeholder",
    ),
    "a digit of the loss": (
        "summary.json",
        r'("val_loss": \d\.\d)\d',
        r"\g<1>X",
        "final.val_loss",
    ),
    "one nll_sum": ("per_query.csv", r"(,\d+\.\d)\d", r"\g<1>X", "final.val_loss "),
    "a row is gone": ("per_query.csv", r"^0.*\n", "", "final.eval_documents 3, found 4"),
    "a row twice": ("metrics.jsonl", r"^(.*\n)", r"\1\1", "iteration 1 in place of 2"),
    "an iteration is gone": (
        "metrics.jsonl",
        r'^.*"iteration":7,.*\n',
        "",
        "found 'iteration 8 in place of 7'",
    ),
    "a log line": ("logs.txt", r"TRAIN", "TRAIM", "SHA-256 of the first"),
    "a time": ("timing.jsonl", r'"train_seconds":\d', '"train_seconds":7', "SHA-256"),
    "a symbol": ("resolved_config.yaml", r'"SEED": 1', '"SEED": 2', "identity of the symbols"),
    "a byte of a snapshot": ("environment/packages.txt", "2.13.0", "2.13.1", "SHA-256"),
    "a byte of the difference": ("code.diff", "a", "c", "SHA-256"),
    "a manifest field": ("manifest.json", r'"micro_batch": 2', '"micro_batch": 4', "digest"),
    "a volatile field": ("manifest.json", r'"host": "', '"host": "x', "volatile.digest"),
    "a status": ("status.json", "SUCCESS", "FAILED", "state SUCCESS, found FAILED"),
    "a progress": ("status.json", r'"iteration": 12', '"iteration": 13', "iteration 12, found 13"),
    "a plan": ("status.json", r'"iterations": 12', '"iterations": 13', "iterations 12, found 13"),
    "an exit code": ("status.json", r'"exit_code": 0', '"exit_code": 1', "exit_code 0, found 1"),
    "NaN in JSON": ("summary.json", r'"train_loss": [\d.]+', '"train_loss": NaN', "NaN is not"),
    "a kind of row": ("metrics.jsonl", r'"kind":"eval"', '"kind":"evil"', "kind in train"),
    "a shorter log": ("logs.txt", r"TRAIN", "", r"bytes \d+, found \d+"),
    "a torn line": ("metrics.jsonl", r"\n\Z", "", "the last line"),
}


def test_damaged_samples_without_a_digest_are_named(run, build_dir):
    heartbeat = run.heartbeat(0)
    with open(heartbeat, "a") as stream:
        stream.write('{"ts":\n')
    run.telemetry.write_text("[1]\n")
    verdict = audit(run, build_dir)
    assert verdict.valid
    for path, line in ((run.telemetry, 1), (heartbeat, len(heartbeat.read_text().splitlines()))):
        assert any(note.startswith(f"{path}:{line}: ") for note in verdict.notes), verdict.notes


@pytest.mark.parametrize("case", EDITS)
def test_every_edit_is_named(run, build_dir, case):
    name, pattern, replacement, expected = EDITS[case]
    path = run.path / name
    if "X" in replacement:
        digit = re.search(pattern, path.read_text())
        assert digit is not None
        other = str((int(digit[0][-1]) + 1) % 10)
        replacement = replacement.replace("X", other)
    edit(path, pattern, replacement)
    findings = found(run, build_dir)
    assert re.search(expected, findings), findings
    # The finding contains the file name.
    assert name in findings


def change(*path: str, to: Any) -> Change:
    """A change of one field of nested objects."""

    def apply(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        assert record[path[-1]] != to
        record[path[-1]] = to

    return apply


FORGERIES: dict[str, tuple[str, Change, str]] = {
    "loss": ("summary", change("final", "val_loss", to=1.5), "final.val_loss"),
    "accuracy": ("summary", change("final", "token_accuracy", to=0.5), "final.token_accuracy"),
    "bytes": ("summary", change("final", "bits_per_byte", to=1.5), "final.bits_per_byte"),
    "training loss": ("summary", change("final", "train_loss", to=1.5), "final.train_loss"),
    "calibration": (
        "summary",
        change("final", "expected_calibration_error", to=0.0),
        "final.expected_calibration_error",
    ),
    "iterations": ("summary", change("final", "iterations", to=13), "each of 13 iterations"),
    "tokens": ("summary", change("final", "tokens", to=1), "tokens 1, found 768"),
    "parameters": ("summary", change("final", "parameters", to=1), "parameters 1, found"),
    "sparsity": ("summary", change("final", "sparsity", to=0.25), "sparsity 0.25, found"),
    "speed": ("summary", change("timing", "tokens_per_second", to=9.5), "tokens_per_second"),
    "order": (
        "summary",
        change("final", "data_order_digest", to="0" * 64),
        "final.data_order_digest",
    ),
    "seed": ("summary", change("seed", to=9), "seed 1, found 9"),
    "type": ("summary", change("final", "iterations", to="12"), "final.iterations of type int"),
    "stretch": (
        "summary",
        change("final", "budget_stretch", to="1"),
        "budget_stretch of type float",
    ),
    "text": ("summary", change("final", "eval_tokens", to="144"), "eval_tokens 144, found '144'"),
    "field": ("summary", lambda record: record.pop("calibration"), "a field calibration.n_tokens"),
    "bins": (
        "summary",
        change("calibration", "n_tokens", to=[]),
        "summary.json: .*ZeroDivisionError",
    ),
    "hash": ("resolved_config", change("hash8", to="0" * 8), "resolved_config.yaml: .* hash8"),
    "identity": ("resolved_config", change("identity", "seed", to=9), "identity of the symbols"),
    "digest": ("manifest", change("config", "config_digest", to="0" * 64), "config.config_digest"),
    "profile": ("manifest", change("run", "run_profile", to="maxout_speed"), "run.run_profile"),
    "weights": ("manifest", change("final_weights_digest", to="0" * 64), "final_weights_digest"),
    "ranks": ("manifest", change("init_weights_digest", to=["a", "b"]), "initial weights"),
    "state": ("manifest", change("status", to="FAILED"), "status \"SUCCESS\"|status 'SUCCESS'"),
    "table": ("manifest", lambda record: record["artifacts"].clear(), "a digest of metrics.jsonl"),
    "schema": ("manifest", change("schema_version", to=1), "schema_version 2, found 1"),
}


# After one of these, the others are not computed.
ALONE = ("iterations", "type", "stretch", "field", "bins", "state", "table", "schema")


@pytest.mark.parametrize("cases", [*((name,) for name in ALONE), FORGERIES.keys() - {*ALONE}])
def test_inconsistent_fields_are_found_under_new_digests(run, build_dir, cases):
    for case in cases:
        name, forge, _ = FORGERIES[case]
        edit_json(run, operator.attrgetter(name)(run), forge)
    findings = found(run, build_dir)
    missing = [case for case in cases if not re.search(FORGERIES[case][2], findings)]
    assert missing == [], findings


def test_forged_rows_are_found_under_new_digests(run, build_dir):
    header, row, *others = run.per_query.read_text().splitlines()
    cells, names = row.split(","), header.split(",")
    forged = {"nll_mean": "1.5", "bits_per_byte": "1.5", "doc_sha256": "0" * 64}
    for name, value in forged.items():
        cells[names.index(name)] = value
    cells[names.index("item_id")] = cells[names.index("item_id")].replace(".txt", ".text")
    run.per_query.write_text("\n".join([header, ",".join(cells), *others[:-1], ""]))
    reseal(run)
    findings = found(run, build_dir)
    for name in ("nll_mean", "bits_per_byte"):
        assert re.search(f"{name} of row 1 '.*', found '1.5'", findings), name
    assert "doc_sha256 of row 1" in findings
    assert re.search(r"item_id of row 1 '0\d.txt', found '0\d.text'", findings)
    assert re.search(r"^per_query.csv: .*documents of the evaluation 4, found 3$", findings, re.M)


@torch.no_grad()
def test_other_weights_are_found_under_new_digests(run, build_dir):
    weights = safetensors.torch.load_file(run.weights)
    weights["h.0.attn.c_attn.weight"][weights["h.0.attn.c_attn.weight"] == 0] = 1e-3
    weights["wpe.weight"][0, 0] = torch.inf
    safetensors.torch.save_file(weights, run.weights)
    reseal(run)
    findings = found(run, build_dir)
    assert "final_weights_digest" in findings
    assert "sparsity of h.0.attn.c_attn.weight" in findings
    assert "non-finite elements in wpe.weight 0, found 1" in findings
    run.weights.write_bytes(run.weights.read_bytes()[:50])
    assert "model.safetensors: expected weights" in found(run, build_dir)


def test_a_log_may_grow(run, build_dir):
    """The loss of a tracker after the end is logged there."""
    with open(run.logs, "a") as log:
        log.write("WARN\n")
    assert found(run, build_dir) == ""
