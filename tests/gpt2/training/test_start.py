"""Errors before the first step, the start line, the manifest and the resolved configuration."""

import json
from dataclasses import replace
from hashlib import sha256

import pytest
import safetensors.torch
import torch

from gpt2.model import GPT
from gpt2.records.files import read_planned_config, read_resolved_config, write_resolved_config
from gpt2.training.manifest import initial_manifest_entries, startup_summary
from gpt2.training.rng import rng_digests, seed_all
from lib.errors import ConfigError, DataError
from lib.files import sha256_file
from lib.runs.checkpoint import weights_digest
from lib.runs.code import loaded_source
from lib.runs.run_dir import RunDir
from lib.runs.seeds import stream_seed


def test_missing_data_is_an_error_before_step_0(configure, train):
    with pytest.raises(DataError) as caught:
        train(configure(VAL_FRACTION="0.4"))
    assert caught.value.codes == ["data.missing"]
    assert "make data" in caught.value.problems[0].next


def test_the_start_line_lists_resolved_settings(session):
    line = startup_summary(session())
    for fact in ("cpu ", "GiB", "fp32", "attention by rows", "1 thread", "12 it x 64 tokens"):
        assert fact in line
    half = {"PRECISION_BF16": True, "PRECISION_WHY": "as it is", "DROPOUT": "0.0"}
    line = startup_summary(session(**half))
    assert "sdpa flash" in line and "bf16" in line


def test_the_manifest_describes_the_run(configure, train, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_API_KEY", "hunter2-secret")
    code = tmp_path / "module.py"
    code.write_text("x = 1\n")
    sources = {**loaded_source(), str(code): sha256_file(code)}
    monkeypatch.setattr("gpt2.training.loop.loaded_source", lambda: sources)
    config = configure()
    train(config, stop_at=5)
    # Edited during the run, whenever it is polled.
    done = train(config, stop=lambda: code.write_text("x = 2222\n") == 0)
    assert "hunter2-secret" not in done.files.manifest.read_text()
    manifest = done.manifest()
    assert manifest["schema_version"] == 2 and manifest["status"] == "SUCCESS"
    assert manifest["run"].items() >= {"hash8": config.hash8, "run_profile": "paper_repro"}.items()
    assert manifest["deviations"] == []
    assert manifest["knobs"]["cpu_threads"] == {"requested": 1, "resolved": 1, "observed": 1}
    assert manifest["data"]["split"]["proof"]["overlap"] == 0
    assert manifest["origin"]["sources"] == sources and "gpt2/training/loop.py" in sources
    assert manifest["code"]["changed_during_run"] == [str(code)]
    volatile = manifest["volatile"]
    attempts = [(a["state"], a["iteration"]) for a in volatile["attempts"]]
    assert attempts == [("INTERRUPTED", 5), ("SUCCESS", 12)]
    for artifacts, names in (
        (manifest["artifacts"], ("weights", "per_query", "metrics", "sample")),
        (volatile["artifacts"], ("summary", "timing", "logs")),
    ):
        paths = [getattr(done.files, name) for name in names]
        assert [artifacts[path.name]["sha256"] for path in paths] == list(map(sha256_file, paths))


def test_the_manifest_has_the_digests_of_weights_and_generators(configure, trained):
    """Recompute seeds, weights and generator states."""
    config, manifest = configure(), trained.manifest()
    weights = safetensors.torch.load_file(trained.files.weights)
    model = GPT(config.model)
    model.init_weights(config.seed)
    assert manifest["final_weights_digest"] == weights_digest(weights)
    assert manifest["init_weights_digest"] == [weights_digest(dict(model.named_parameters()))]
    streams = manifest["rng"]["streams"]
    assert streams["data"] == stream_seed(config.seed, "data")
    assert streams["init"]["wte.weight"] == stream_seed(config.seed, "init/wte.weight")
    seed_all(config.seed)
    found = rng_digests(torch.device("cpu"))
    assert manifest["rng_state_at_start"] == {name: [digest] for name, digest in found.items()}
    # Only torch's generator is used, by dropout.
    moved = {n for n in found if manifest["rng_state_at_end"][n] != [found[n]]}
    assert moved == {"torch"}


def test_a_fallback_keeps_the_identity(session):
    opened = session()
    write_resolved_config(opened.run, opened.config)
    before = initial_manifest_entries(opened, {})
    smaller = replace(opened.config.train, batch_size=1, grad_accumulation=4)
    opened.config = replace(opened.config, train=smaller)
    after = initial_manifest_entries(opened, {})
    assert after["run"] == before["run"] and after["config"] == before["config"]
    assert after["batch"]["micro_batch"] == 1


def test_a_folder_of_another_run_is_not_overwritten(configure, tmp_path):
    run = RunDir(tmp_path)
    write_resolved_config(run, configure())
    before = run.resolved_config.read_bytes()
    with pytest.raises(ConfigError) as caught:
        write_resolved_config(run, configure(SEED=2))
    assert caught.value.codes == ["run.foreign-directory"]
    assert run.resolved_config.read_bytes() == before
    write_resolved_config(run, configure(LOG_INTERVAL=1))
    assert run.resolved_config.read_bytes() != before


def test_a_resolved_configuration_survives_the_round_trip(configure, tmp_path):
    """A record without a newer symbol has its default."""
    run, config = RunDir(tmp_path), configure(SAMPLE_PROMPT='$(shell true) "quoted" `x` é')
    write_resolved_config(run, config)
    assert read_planned_config(run) == config and read_planned_config(run).values == config.values
    record = json.loads(run.resolved_config.read_text())
    del record["symbols"]["MODEL_PARAMS"]
    run.resolved_config.write_text(json.dumps(record))
    assert read_resolved_config(run).values["MODEL_PARAMS"] == config.values["MODEL_PARAMS"]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        # One that would make it another run has no default.
        ('"N_LAYER": 2,', "", "config.missing-symbol"),
        ('"hash8": "', '"hash8": "0', "run.other-code"),
        ("{", "", "run.damaged"),
    ],
)
def test_a_changed_record_is_rejected(configure, tmp_path, old, new, code):
    run = RunDir(tmp_path)
    write_resolved_config(run, configure())
    text = run.resolved_config.read_text()
    assert old in text
    run.resolved_config.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_resolved_config(run)
    assert set(caught.value.codes) == {code}


def test_private_values_are_recorded_empty_with_a_digest(configure, tmp_path):
    command = "curl https://example.org/hook?token=1"
    config = configure(ON_DONE_CMD=command)
    assert config.hash8 == configure().hash8
    run = RunDir(tmp_path)
    source = {"value": command, "label": "edited", "where": ".config"}
    write_resolved_config(run, config, {"ON_DONE_CMD": source})
    record = json.loads(run.resolved_config.read_text())
    assert "example.org" not in json.dumps(record)
    assert record["settings"] == {"ON_DONE_CMD": {**source, "value": ""}}
    assert record["private_sha256"] == {"ON_DONE_CMD": sha256(command.encode()).hexdigest()}
