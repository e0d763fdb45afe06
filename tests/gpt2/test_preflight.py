"""How many runs a machine takes at a time; there need be no GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpt2 import preflight
from gpt2.ablation.resolve import resolve_config
from gpt2.config import Config
from lib.kconfig import Layer, Tree


def with_processes(config: Config, device: str, gpus: int, threads: int) -> Config:
    """``config`` on a device, in several processes."""
    train = replace(config.train, gpus=gpus, batch_size=1, global_batch=gpus, grad_accumulation=1)
    machine = replace(config.machine, device=device, cpu_threads=threads)
    return replace(config, train=train, machine=machine)


def test_a_slot_is_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("gpt2.preflight.preflight", lambda machine, gpus: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("gpt2.preflight.usable_cores", lambda: 12)
    config = resolve_config(Tree(), [Layer.of("test", "test", {"SINGLE_TRAINING": True})])
    place = preflight.Place(tmp_path, tmp_path, dirty=True)
    on_gpus = [with_processes(config, "cuda", 4, 1)]
    assert preflight.check_machine(on_gpus, place) == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
    ]
    assert len(preflight.check_machine([with_processes(config, "cpu", 2, 3)], place)) == 2
    assert len(preflight.check_machine([with_processes(config, "cpu", 16, 1)], place)) == 1
