"""Calibration and GPU day: rates, factor and margin; parts that stop by the clock and continue."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt2 import loss
from gpt2.ablation.resolve import resolve_config
from gpt2.bench import device_worker, gpu_day, repeat_worker
from gpt2.bench.device_worker import (
    device_rates,
    loss_rows,
    parity_rows,
    plain_rows,
    step_row,
    variants,
)
from gpt2.config import Config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import EXIT_DONE, EXIT_TIME_LIMIT, RunError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config() -> Config:
    """Reciprocal attention, small."""
    settings = {
        "SINGLE_TRAINING": True,
        "CPU_THREADS": 1,
        "DEVICE_CPU": True,
        "TOKENIZER_BYTE": True,
        "RECIPROCAL": True,
        "MODEL_SIZE_CUSTOM": True,
        "N_LAYER": 2,
        "N_HEAD": 2,
        "N_EMBD": 32,
        "BLOCK_SIZE": 32,
        "GLOBAL_BATCH": 2,
        "BATCH_SIZE": 1,
        "GRAD_ACCUMULATION": 2,
        "DROPOUT": "0.1",
    }
    return resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", settings)])


def test_a_step_is_measured_beside_its_prediction(config: Config) -> None:
    rates = device_rates(config, CPU)
    assert all(rate > 1e6 for rate in (*rates.flops.values(), rates.bytes_per_second))
    row = step_row(config, CPU, rates, None)
    assert row["tokens"] == 32 and row["seconds"] > 0 and row["predicted_seconds"] > 0
    labels = [label for label, _ in variants("ra", config, first=False)]
    assert labels == ["ra", "ra, triton"]
    # The compiled form is not predicted.
    assert len(list(variants("ra", config, first=True))) == 5


def test_every_backend_agrees_with_rows_in_float64(config: Config) -> None:
    rows = list(parity_rows(config, CPU))
    states = {"rows": "PASS", "triton": "ABSENT"}
    assert {(row["backend"], row["precision"], row["state"]) for row in rows} == {
        (backend, precision, state)
        for backend, state in states.items()
        for precision in ("fp32", "fp16", "bf16")
    }


def test_plain_attention_is_compared_by_the_backends_that_can_be_configured(config: Config) -> None:
    attention = dataclasses.replace(config.model.attention, terms=())
    plain = dataclasses.replace(
        config, model=dataclasses.replace(config.model, attention=attention)
    )
    states = {row["backend"]: row["state"] for row in parity_rows(plain, CPU)}
    absent = {"efficient": "ABSENT", "triton": "ABSENT"}
    assert states == {"auto": "PASS", "flash": "PASS", "math": "PASS"} | absent


def test_the_plain_loop_trains_the_same_sizes(config: Config) -> None:
    rows = plain_rows(config, CPU, 1)
    first, second = next(rows), next(rows)
    assert (first["loop"], second["loop"]) == ("plain", "trainer")
    assert first["ms"] > 0 and not first["compiled"]


def test_the_loss_is_compared_in_every_precision(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> dict[tuple[str, str], str]:
        found = loss_rows(config, CPU)
        return {(row["backend"], row["precision"]): row["state"] for row in found}

    precisions = ("fp32", "bf16", "fp16")
    by_torch = {("loss torch", precision): "PASS" for precision in precisions}
    absent = {("loss triton", precision): "ABSENT" for precision in precisions}
    assert rows() == by_torch | absent

    def wrong(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
        loss._to_gradient_(logits, targets, losses, loss.LogitsChunks())
        logits *= 1.1

    kernels = {"torch": None, "triton": wrong}
    monkeypatch.setattr(device_worker, "softmax_gradient", lambda backend, _: kernels[backend])
    assert rows() == by_torch | dict.fromkeys(absent, "FAIL")


def test_factor_and_margin_are_those_of_the_measured_steps() -> None:
    head = {"device": "card", "rates": {"factor": 1.0}}
    rows = [{"seconds": s, "predicted_seconds": 1.0} for s in (1.0, 4.0)]
    rates = gpu_day.calibrated_rates(head, [*rows, {"error": "out of memory"}])
    assert (rates["factor"], rates["margin"]) == (2.0, 2.0)
    assert "2 steps on card" in rates["source"]
    # Without a predicted step, nothing was compared.
    assert gpu_day.calibrated_rates(head, [{"error": "out of memory"}]) == {"factor": 1.0}


def run(folder: Path, name: str, code: str, seconds: float = 20.0) -> dict[str, Any]:
    """Run Python code as a part, and keep its result, as one of "this"."""
    result = gpu_day._run_part([sys.executable, "-c", code], seconds, {}) | {"measured": "this"}
    (folder / f"{name}.json").write_text(json.dumps(result))
    return result


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process after ``seconds``."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_a_part_stops_by_the_clock_and_runs_again(tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(tmp_path, "nsa", "import time; print(1, flush=True); time.sleep(60)", 0.5)
    assert result["code"] == EXIT_TIME_LIMIT and result["output"] == "1\n"
    assert time.monotonic() - started < 15
    assert run(tmp_path, "nsa", "print(2)")["code"] == EXIT_DONE
    assert gpu_day._result(tmp_path, "nsa", "this") is not None
    assert gpu_day._result(tmp_path, "nsa", "other") is None
    assert gpu_day._result(tmp_path, "plain", "this") is None


class Arguments(SimpleNamespace):
    """Arguments of gpu_day."""

    minutes, tokens = "1", ""


def test_a_part_is_kept_until_what_it_measures_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def part(command: list[str], seconds: float, values: object) -> dict[str, Any]:
        ran.append(command[0])
        code = EXIT_TIME_LIMIT if (command[0], len(ran)) == ("two", 2) else EXIT_DONE
        return {"code": code, "seconds": 1.0, "output": f"{command}\n", "errors": ""}

    values = {"baseline": {"DEVICE": "cpu", "BATCH_SIZE": 1}}
    parts = {"one": (1, ["one"]), "two": (1, ["two"]), "late": (90, ["late"])}
    monkeypatch.setattr(gpu_day, "plan_values", lambda args: values)
    monkeypatch.setattr(gpu_day, "_parts", lambda *_: parts)
    monkeypatch.setattr(gpu_day, "_run_part", part)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = Arguments(build_dir=tmp_path)
    for expected in (["one", "two"], ["two"], []):
        ran_before = len(ran)
        code, text = gpu_day.gpu_day(args)
        assert (code, ran[ran_before:]) == (EXIT_DONE, expected)
        assert "Without a result: late." in text
    # Another configuration, and other arguments of one part.
    values["baseline"]["BATCH_SIZE"] = 2
    gpu_day.gpu_day(args)
    assert ran[3:] == ["one", "two"]
    parts["two"] = (1, ["two", "--tokens", "512"])
    _, text = gpu_day.gpu_day(args)
    assert ran[5:] == ["two"] and "512" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_the_part_too(tmp_path: Path, number: int) -> None:
    code = f"""
import os, signal, sys
from gpt2.bench import gpu_day
signal.signal({number}, gpu_day._end)
child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
gpu_day._run_part([sys.executable, "-c", child], 50.0, {{}})
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as process:
        ends = time.monotonic() + 60
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_stops_the_part(tmp_path: Path) -> None:
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "pid")]
    with interrupted_after(1.5), pytest.raises(KeyboardInterrupt):
        gpu_day._run_part(command, 20.0, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_repeat_starts_anew_and_refuses_a_run_that_cannot_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repeated"
    (folder / "first").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["repeat_worker", str(folder), "cpu"])
    monkeypatch.setattr(repeat_worker, "make", lambda *_: ["true"])
    monkeypatch.setattr(repeat_worker, "trained", lambda *_: folder)
    with pytest.raises(RunError) as caught:
        repeat_worker.main()
    assert caught.value.codes == ["process.failed"]
    assert not folder.exists()


def test_an_interrupted_repetition_leaves_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    commands = iter([["true"], [sys.executable, "-c", code]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repeat_worker, "make", lambda *_: next(commands))
    with interrupted_after(2.0), pytest.raises(KeyboardInterrupt):
        repeat_worker.killed(tmp_path / "folder", [])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("device", "given", "tokens"),
    [("cpu", "", "2048"), ("cuda", "", "65536"), ("cuda", "9000", "9000")],
)
def test_the_length_of_sparse_attention(device: str, given: str, tokens: str) -> None:
    values = {"baseline": {"DEVICE": device, "BATCH_SIZE": 1}}
    _, command = gpu_day._parts(Path("build"), values, given)["nsa"]
    assert command[command.index("--tokens") + 1] == tokens


def test_the_report_shows_rows_as_a_table_and_errors(tmp_path: Path) -> None:
    run(tmp_path, "parity", 'print(\'{"step": "ra", "state": "PASS"}\')')
    run(tmp_path, "plain", "import sys; sys.exit('no memory')")
    text = gpu_day._report(tmp_path, dict.fromkeys(("parity", "plain", "nsa"), "this"))
    assert text.splitlines()[2].startswith("Without a result: nsa.")
    assert "| ra   |  PASS |" in text and "no memory" in text and "exit code 1" in text
