"""Predicted time of a step: kernels counted, rates of a device, a stored calibration."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt2.config import Config
from gpt2.memory.cost import (
    CALIBRATION,
    DeviceRates,
    Kernel,
    assumed_rates,
    predict_step,
    rates,
)
from gpt2.memory.fake_step import FakeTrainingStep
from gpt2.memory.predict import step_prediction
from gpt2.memory.tracker import StorageTracker
from lib.env.gpu import GPUS, find_gpu
from lib.errors import ConfigError
from lib.json_files import DamagedRecord

Configure = Callable[..., Config]
RATES = DeviceRates({"half": 100.0, "fp32": 10.0}, 50.0, kernel_seconds=1.0, launch_seconds=2.0)


def counted(work: Callable[[], object]) -> Counter[Kernel]:
    """Return the kernels of ``work`` on fake tensors."""
    with StorageTracker() as tracker:
        work()
    return tracker.kernels[tracker.stage]


def test_a_kernel_takes_the_longest_of_arithmetic_traffic_and_launch() -> None:
    assert RATES.device_seconds({Kernel("half", 1000.0, 50.0): 2}) == 20.0
    assert RATES.device_seconds({Kernel("fp32", 10.0, 500.0): 1}) == 10.0
    assert RATES.device_seconds({Kernel("memory", 0.0, 1.0): 3}) == 3.0


def test_operations_count_their_bytes_and_views_count_nothing() -> None:
    a = torch.zeros(4, 8)
    with StorageTracker():
        table = torch.empty(1000, 8)
        index = torch.zeros(4, dtype=torch.long)
    assert counted(lambda: a @ a.t()) == {Kernel("fp32", 256.0, 2 * 128 + 64.0): 1}
    assert counted(lambda: a.to(torch.bfloat16)) == {Kernel("memory", 0.0, 128 + 64.0): 1}
    assert counted(lambda: a.add_(a)) == {Kernel("memory", 0.0, 3 * 128.0): 1}
    assert not counted(lambda: (a.view(8, 4), a.t(), torch.empty_like(a), a.detach()))
    # A lookup reads the rows that it returns, not the table.
    assert counted(lambda: table[index]) == {Kernel("memory", 0.0, 3 * 128.0): 1}


def test_depth_and_micro_batches_multiply_kernels(configure: Configure, monkeypatch) -> None:
    config = configure("ract", GLOBAL_BATCH=4, BATCH_SIZE=2, GRAD_ACCUMULATION=2)
    gpu = find_gpu("h100")
    short = FakeTrainingStep(config).needs(gpu, 2).kernels
    one = predict_step(short, config, assumed_rates("h100", "bf16", "high"), "h100", 1)
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    whole = FakeTrainingStep(config).needs(gpu, 2).kernels
    assert short[0] == whole[0]
    assert sum(short[1].values()) == sum(whole[1].values())
    assert one.launches == 2 * sum(short[0].values()) + sum(short[1].values())


def test_a_faster_card_is_faster_and_launches_bound_small_steps(configure: Configure) -> None:
    config = configure("baseline", GLOBAL_BATCH=2, GRAD_ACCUMULATION=1)
    seconds = {}
    for name in ("l4", "a100-80", "h100", "b200"):
        prediction = step_prediction(config, find_gpu(name), assumed_rates(name, "bf16", "high"))
        seconds[name] = prediction.seconds
        assert prediction.tokens_per_second * prediction.seconds == 2 * 256
        assert prediction.mfu is not None and 0 < prediction.mfu < 1
    assert sorted(seconds, key=seconds.__getitem__, reverse=True) == list(seconds)
    slow_host = DeviceRates({"half": 1e15, "fp32": 1e15, "attention-half": 1e15}, 1e15)
    assert step_prediction(config, find_gpu("h100"), slow_host).bound == "launches"


def test_every_card_has_rates_of_its_precisions() -> None:
    for gpu in GPUS.values():
        for precision in gpu.tflops.keys() - {"tf32"}:
            assumed = assumed_rates(gpu.name, precision, "high")
            assert 0 < assumed.bytes_per_second < gpu.gbs * 1e9
            assert assumed.flops["half" if precision != "fp32" else "fp32"] > 0
    with pytest.raises(ConfigError) as caught:
        assumed_rates("t4", "bf16", "high")
    assert caught.value.codes == ["gpu.unknown-peak"]


def test_a_calibration_of_this_card_replaces_the_assumptions(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("baseline")
    assert rates(config, "h100", tmp_path).source.startswith("predicted, never compared")
    stored = {"flops": {"half": 1.0}, "bytes_per_second": 2.0, "factor": 1.5, "margin": 1.2}
    (tmp_path / CALIBRATION).write_text(json.dumps({"h100": {**stored, "source": "measured"}}))
    measured = rates(config, "H100 80GB", tmp_path)
    assert (measured.source, measured.factor, measured.margin) == ("measured", 1.5, 1.2)
    assert rates(config, "a100-80", tmp_path).factor == 1.0
    (tmp_path / CALIBRATION).write_text("{")
    with pytest.raises(DamagedRecord):
        rates(config, "h100", tmp_path)
