"""A finished run is VALID; every kind of damage makes it INVALID and is listed."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from gpt2.records.audit import audit, to_json, to_text
from lib.files import sha256_file, write_json
from lib.runs.manifest import finalize_run, write_manifest
from lib.runs.run_dir import RunDir, RunStatus, State

FILES = (
    *("summary.json", "per_query.csv", "manifest.json", "logs.txt", "resolved_config.yaml"),
    *("metrics.jsonl", "model.safetensors", "timing.jsonl"),
)


@pytest.fixture(scope="session")
def whole(trained, tmp_path_factory) -> RunDir:
    """A finished run with a snapshot of its environment and a difference of its code."""
    folder = tmp_path_factory.mktemp("audited") / trained.files.path.name
    run = RunDir(shutil.copytree(trained.files.path, folder))
    (run.path / "environment").mkdir(exist_ok=True)
    packages, diff = run.path / "environment" / "packages.txt", run.path / "code.diff"
    packages.write_text("torch==2.13.0\n")
    diff.write_text("--- a\n+++ b\n")
    manifest = trained.manifest()
    manifest["environment"]["snapshot"] = {packages.name: sha256_file(packages)}
    manifest["code"]["diff"] = {"file": diff.name, "sha256": sha256_file(diff)}
    write_manifest(run, manifest)
    return run


@pytest.fixture
def run(whole, tmp_path) -> RunDir:
    """A copy of the run that a test may damage."""
    return RunDir(shutil.copytree(whole.path, tmp_path / "copy"))


def found(run: RunDir, build_dir: Path) -> str:
    """Return the findings of the audit, one per line."""
    return "\n".join(map(str, audit(run, build_dir).findings))


def reseal(run: RunDir) -> None:
    """Recompute the digests, as a forger of results would."""
    finalize_run(run, RunStatus(State.SUCCESS))


@pytest.mark.slow
def test_a_finished_run_is_valid(run, build_dir):
    verdict = audit(run, build_dir)
    assert (verdict.findings, verdict.notes) == ([], [])
    assert to_text([verdict]) == f"VALID   {run.path}\n"
    (document,) = json.loads(to_json([verdict]))["runs"]
    assert document["valid"] is True
    # The loss of a tracker after the end is logged.
    with open(run.logs, "a") as log:
        log.write("WARN\n")
    assert found(run, build_dir) == ""


def test_what_is_no_damage_of_the_run_is_a_note(run, build_dir, tmp_path, monkeypatch):
    """Absent data, a changed byte of the held-out text, and other code."""
    build = shutil.copytree(build_dir, tmp_path / "build")
    # Other tests prepare other data sets there.
    for shard in build.glob("data/**/val*.bin"):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    for folder, code, note in (
        (tmp_path, [], "evaluation documents: data set "),
        (build, [], "evaluation documents: damaged: SHA-256 mismatch"),
        (build_dir, ["gpt2/model.py"], "made by other code (gpt2/model.py)"),
    ):
        monkeypatch.setattr("gpt2.records.audit.changed_since", lambda *recorded, code=code: code)
        verdict = audit(run, folder)
        assert verdict.valid and note in to_text([verdict])


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_required(run, build_dir, name):
    (run.path / name).unlink()
    assert f"{name}: expected a file, found none" in found(run, build_dir)
    (run.path / name).touch()
    assert f"{name}: expected content, found 0 bytes" in found(run, build_dir)


def test_damaged_samples_without_a_digest_are_named(run, build_dir):
    heartbeat = run.heartbeat(0)
    with open(heartbeat, "a") as stream:
        stream.write('{"ts":\n')
    run.telemetry.write_text("[1]\n")
    verdict = audit(run, build_dir)
    assert verdict.valid
    for path, line in ((run.telemetry, 1), (heartbeat, len(heartbeat.read_text().splitlines()))):
        assert any(note.startswith(f"{path}:{line}: ") for note in verdict.notes), verdict.notes


# File, what is replaced by what, and the finding; X is another digit than the one that was there.
EDITS = [
    ("per_query.csv", r"(?s)\A.*\Z", "note,placeholder\n", "found note,placeholder"),
    ("summary.json", r'("val_loss": \d\.\d)\d', r"\g<1>X", "final.val_loss"),
    ("per_query.csv", r"(,\d+\.\d)\d", r"\g<1>X", "final.val_loss "),
    ("per_query.csv", r"^0.*\n", "", "final.eval_documents 3, found 4"),
    ("metrics.jsonl", r"^(.*\n)", r"\1\1", "iteration 1 in place of 2"),
    ("metrics.jsonl", r'^.*"iteration":7,.*\n', "", "found 'iteration 8 in place of 7'"),
    ("metrics.jsonl", r'"kind":"eval"', '"kind":"evil"', "kind in train"),
    ("metrics.jsonl", r"\n\Z", "", "the last line"),
    ("logs.txt", r"TRAIN", "TRAIM", "SHA-256 of the first"),
    ("logs.txt", r"TRAIN", "", r"bytes \d+, found \d+"),
    ("timing.jsonl", r'"train_seconds":\d', '"train_seconds":7', "SHA-256"),
    ("resolved_config.yaml", r'"SEED": 1', '"SEED": 2', "identity of the symbols"),
    ("environment/packages.txt", "2.13.0", "2.13.1", "SHA-256"),
    ("code.diff", "a", "c", "SHA-256"),
    ("manifest.json", r'"micro_batch": 2', '"micro_batch": 4', "digest"),
    ("manifest.json", r'"host": "', '"host": "x', "volatile.digest"),
    ("status.json", "SUCCESS", "FAILED", "state SUCCESS, found FAILED"),
    ("status.json", r'"iteration": 12', '"iteration": 13', "iteration 12, found 13"),
    ("status.json", r'"iterations": 12', '"iterations": 13', "iterations 12, found 13"),
    ("status.json", r'"exit_code": 0', '"exit_code": 1', "exit_code 0, found 1"),
    ("summary.json", r'"train_loss": [\d.]+', '"train_loss": NaN', "NaN is not"),
]


@pytest.mark.parametrize(("name", "pattern", "replacement", "expected"), EDITS)
def test_every_edit_is_named(run, build_dir, name, pattern, replacement, expected):
    path = run.path / name
    before = path.read_text()
    if "X" in replacement:
        digit = re.search(pattern, before)
        assert digit is not None
        replacement = replacement.replace("X", str((int(digit[0][-1]) + 1) % 10))
    after, count = re.subn(pattern, replacement, before, count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(after)
    findings = found(run, build_dir)
    assert re.search(expected, findings), findings
    # The finding contains the file name.
    assert name in findings


# File, field, forged value (None removes the field), and the finding.
FORGERIES = [
    ("summary", "final.val_loss", 1.5, "final.val_loss"),
    ("summary", "final.token_accuracy", 0.5, "final.token_accuracy"),
    ("summary", "final.bits_per_byte", 1.5, "final.bits_per_byte"),
    ("summary", "final.train_loss", 1.5, "final.train_loss"),
    ("summary", "final.expected_calibration_error", 0.0, "final.expected_calibration_error"),
    ("summary", "final.tokens", 1, "tokens 1, found 768"),
    ("summary", "final.parameters", 1, "parameters 1, found"),
    ("summary", "final.sparsity", 0.25, "sparsity 0.25, found"),
    ("summary", "timing.tokens_per_second", 9.5, "tokens_per_second"),
    ("summary", "final.data_order_digest", "0" * 64, "final.data_order_digest"),
    ("summary", "seed", 9, "seed 1, found 9"),
    ("summary", "final.eval_tokens", "144", "eval_tokens 144, found '144'"),
    ("resolved_config", "hash8", "0" * 8, "resolved_config.yaml: .* hash8"),
    ("resolved_config", "identity.seed", 9, "identity of the symbols"),
    ("manifest", "config.config_digest", "0" * 64, "config.config_digest"),
    ("manifest", "run.run_profile", "maxout_speed", "run.run_profile"),
    ("manifest", "final_weights_digest", "0" * 64, "final_weights_digest"),
    ("manifest", "init_weights_digest", ["a", "b"], "initial weights"),
]
# After one of these, the others are not computed.
ALONE = [
    ("summary", "final.iterations", 13, "each of 13 iterations"),
    ("summary", "final.iterations", "12", "final.iterations of type int"),
    ("summary", "final.budget_stretch", "1", "budget_stretch of type float"),
    ("summary", "calibration", None, "a field calibration.n_tokens"),
    ("summary", "calibration.n_tokens", [], "summary.json: .*ZeroDivisionError"),
    ("manifest", "status", "FAILED", "status \"SUCCESS\"|status 'SUCCESS'"),
    ("manifest", "artifacts", {}, "a digest of metrics.jsonl"),
    ("manifest", "schema_version", 1, "schema_version 2, found 1"),
]


@pytest.mark.parametrize("forgeries", [FORGERIES, *([forgery] for forgery in ALONE)])
def test_inconsistent_fields_are_found_under_new_digests(run, build_dir, forgeries):
    for file, field, value, _ in forgeries:
        path = getattr(run, file)
        record = json.loads(path.read_text())
        *parents, name = field.split(".")
        place = functools.reduce(dict.__getitem__, parents, record)
        assert place.pop(name) != value
        if value is not None:
            place[name] = value
        if path == run.manifest:
            write_manifest(run, record)
        else:
            write_json(path, record)
            reseal(run)
    findings = found(run, build_dir)
    missing = [field for _, field, _, finding in forgeries if not re.search(finding, findings)]
    assert missing == [], findings


def test_forged_rows_are_found_under_new_digests(run, build_dir):
    header, row, *others = run.per_query.read_text().splitlines()
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    cells |= {"nll_mean": "1.5", "bits_per_byte": "1.5", "doc_sha256": "0" * 64}
    cells["item_id"] = cells["item_id"].replace(".txt", ".text")
    run.per_query.write_text("\n".join([header, ",".join(cells.values()), *others[:-1], ""]))
    reseal(run)
    findings = found(run, build_dir)
    for expected in (
        "nll_mean of row 1 '.*', found '1.5'",
        "bits_per_byte of row 1 '.*', found '1.5'",
        "doc_sha256 of row 1",
        r"item_id of row 1 '0\d.txt', found '0\d.text'",
        "^per_query.csv: .*documents of the evaluation 4, found 3$",
    ):
        assert re.search(expected, findings, re.MULTILINE), expected


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
