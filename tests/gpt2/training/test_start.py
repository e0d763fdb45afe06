"""Errors before the first step, the start line, the manifest and the resolved configuration."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2.config import Config
from gpt2.runs import read_resolved_config, write_resolved_config
from gpt2.training.describe import start_line
from gpt2.training.session import Session
from lib.errors import ConfigError, DataError, PreflightError
from lib.files import sha256
from lib.rundir import RunDir

Configure = Callable[..., Config]


def test_missing_data_is_an_error_before_step_0(configure: Configure, train: Callable) -> None:
    with pytest.raises(DataError, match="make data"):
        train(configure(VAL_FRACTION="0.4"))


def test_cuda_without_a_gpu_is_an_error_before_step_0(
    configure: Configure, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PreflightError, match="no GPU"):
        train(configure(DEVICE_CPU=None, DEVICE_CUDA=True))


def test_the_start_line_says_what_was_resolved(session: Callable[..., Session]) -> None:
    line = start_line(session())
    for fact in ("cpu ", "GiB", "fp32", "attention by rows", "1 thread", "12 it x 64 tokens"):
        assert fact in line
    assert "sdpa flash" in start_line(session(DROPOUT="0.0"))
    assert "by rows" in start_line(session(RECIPROCAL=True))
    assert "bf16" in start_line(session(PRECISION_BF16=True, PRECISION_WHY="as it is"))


def test_the_manifest_tells_what_made_the_run(
    configure: Configure, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2-secret")
    config = configure()
    train(config, stop_at=5)
    done = train(config)
    text = done.files.manifest.read_text()
    manifest = json.loads(text)
    assert "hunter2-secret" not in text
    assert manifest["schema_version"] == 1
    assert manifest["run"] == {"name": "run", "hash8": config.hash8}
    assert manifest["seeds"]["seed"] == config.seed
    assert manifest["deviations"] == []
    assert manifest["knobs"]["cpu_threads"] == {"requested": 1, "resolved": 1, "observed": 1}
    assert manifest["data"]["split"]["proof"]["overlap"] == 0
    assert manifest["origin"]["sources"]["gpt2/train.py"]
    assert manifest["code"]["changed_during_run"] == []
    assert len(manifest["volatile"]["attempts"]) == 2
    for path in (done.files.weights, done.files.per_query, done.files.summary, done.files.metrics):
        assert manifest["artifacts"][path.name]["sha256"] == sha256(path)


def test_a_resolved_configuration_survives_the_round_trip(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(SAMPLE_PROMPT='$(shell true) "quoted" `x` é')
    write_resolved_config(RunDir(tmp_path), config)
    assert read_resolved_config(RunDir(tmp_path)) == config
    assert read_resolved_config(RunDir(tmp_path)).values == config.values


def test_a_configuration_that_means_another_run_now_is_refused(
    configure: Configure, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    write_resolved_config(run, configure())
    record = json.loads(run.resolved_config.read_text())
    run.resolved_config.write_text(json.dumps(record | {"hash8": "00000000"}))
    with pytest.raises(ConfigError, match="made by other code"):
        read_resolved_config(run)
    run.resolved_config.write_text("{")
    with pytest.raises(ConfigError, match="not a resolved configuration"):
        read_resolved_config(run)
