"""The check of devices: its branch of a GPU, run on a CPU with the small form as the configured one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.check import CHECKS, command, device_checks
from gpt2.check.cases import config_layers_to_check, plan_cases
from gpt2.check.context import CheckContext
from gpt2.check.finding import CheckFinding
from gpt2.check.subject import StepUnderTest
from gpt2.mechanism_statistics import collect_statistics
from gpt2.nsa import branches
from lib.env.gpu import GPUS, NO_GPUS


@pytest.fixture
def compared() -> Callable[[str, str], list[CheckFinding]]:
    """Return a function that compares the small form of a step on the CPU."""

    def compare(defconfig: str, slug: str) -> list[CheckFinding]:
        (case,) = plan_cases(config_layers_to_check(Path(), defconfig), slug).chosen
        with CheckContext() as context:
            small = StepUnderTest(case, context).small
            subject = StepUnderTest(replace(case, config=small), context)
            return device_checks.on_device(subject, torch.device("cpu"))

    return compare


@pytest.mark.slow
def test_forms_of_a_step_agree(compared):
    assert compared("gpt2-ratio-ablation", "full") == []
    assert compared("nsa-quickstart", "nsa") == []


def test_few_workers_share_a_gpu(monkeypatch):
    workers, environments = list[int](), list[dict[str, str]]()

    class Executor:
        def __init__(self, modules: Any, environment: dict[str, str]) -> None:
            environments.append(environment)

        def submit_call(self, *given: Any) -> Any:
            return given

        def results(self, started: Sequence[Any]) -> list[Any]:
            workers.append(len(started))
            return []

    cases = plan_cases(config_layers_to_check(Path(), "gpt2-ratio-ablation"), "all")
    monkeypatch.setattr(command, "usable_cores", lambda: 16)
    monkeypatch.setattr(command, "LocalExecutor", Executor)
    for gpu in (None, GPUS["h100"]):
        monkeypatch.setattr(command, "local_gpu", lambda gpu=gpu: gpu)
        command.run_all(cases, [CHECKS["device"]], Path())
    assert workers == [16, 4]
    interpreted, on_gpu = environments
    assert interpreted["TRITON_INTERPRET"] == "1" and on_gpu == {"OMP_NUM_THREADS": "1"}
    assert interpreted.keys() >= NO_GPUS.keys()


def test_values_gradients_and_statistics_are_compared(compared, monkeypatch):
    calls = []

    def collected(model, idx_BT):
        """Halve the statistics of the third form, the configured one."""
        calls.append(model)
        by_name = collect_statistics(model, idx_BT)
        scale = 0.5 if len(calls) == 3 else 1.0
        return {name: [x and scale * x for x in row] for name, row in by_name.items()}

    real = branches.attend_selected
    monkeypatch.setattr(branches, "attend_selected", lambda *given: 1.05 * real(*given))
    monkeypatch.setattr(device_checks, "collect_statistics", collected)
    found = {finding.expected.split()[1] for finding in compared("nsa-quickstart", "nsa")}
    assert found == {"loss", "gradient", "statistic"}
