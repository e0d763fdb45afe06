"""The second process, and the classification of errors: checked code or check."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2.check import model_checks, process_checks
from gpt2.check.cases import config_layers_to_check, plan_cases
from gpt2.check.context import PEER_TIMEOUT_SECONDS, CheckContext, ErrorCapture
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from lib.env.process_group import ProcessGroup
from lib.errors import Problem, RunError


@pytest.mark.parametrize(
    ("call", "argument", "code", "words"),
    [
        (model_checks.check_causal, SimpleNamespace(), "check.defect", "model_checks.py"),
        (torch.nn.Linear(2, 3), torch.zeros(3), "check.exception", "RuntimeError"),
    ],
)
def test_an_exception_in_a_check_is_its_defect_and_any_other_one_of_the_code(
    call, argument, code, words
):
    with ErrorCapture() as outcome:
        call(argument)
    assert outcome.code == code and words in outcome.text


def test_an_error_with_a_code_keeps_it_and_loses_its_advice():
    """The configuration is valid, so a command that changes it would not help."""
    with ErrorCapture() as outcome:
        problem = Problem("no", "step ra", "type: make menuconfig", code="run.locked")
        raise RunError(problem, Problem("never", code="run.other"))
    assert outcome.code == "run.locked"
    assert outcome.text.startswith("error in the product or in the check, not in the configuration")
    assert outcome.text.endswith(": step ra: no; never") and "menuconfig" not in outcome.text


def test_an_error_of_the_second_process_is_that_of_a_call_here():
    with CheckContext() as context:
        with ErrorCapture() as refused:
            context.peer.submit(_refuse).result(PEER_TIMEOUT_SECONDS)
        assert context.peer.submit(abs, -3).result(PEER_TIMEOUT_SECONDS) == 3
        with ErrorCapture() as died:
            context.peer.submit(os._exit, 1).result(PEER_TIMEOUT_SECONDS)
    assert refused.code == "run.locked" and refused.text.count("error in the product") == 1
    assert died.code == "check.peer"


def _refuse():
    raise RunError(Problem("no", code="run.locked"))


@pytest.mark.slow
def test_a_failure_in_one_rank_does_not_affect_the_next_step(monkeypatch):
    """Rank 0 raises while rank 1 waits for its gradients."""
    first, *_, second = plan_cases(
        config_layers_to_check(Path(), "gpt2-ratio-ablation"), "0-2"
    ).chosen
    join, failing = process_checks._join_group, [True]

    def join_and_fail(rank, rendezvous):
        join(rank, rendezvous)
        if not rank and failing:
            raise TypeError

    monkeypatch.setattr(process_checks, "_join_group", join_and_fail)
    with CheckContext() as context:
        with pytest.raises(TypeError):
            list(process_checks.check_parallel(StepUnderTest(first, context)))
        failing.clear()
        assert list(process_checks.check_parallel(StepUnderTest(second, context))) == []


@pytest.mark.slow
def test_sharded_ranks_have_the_gradients_of_one_process(monkeypatch):
    case = plan_cases(config_layers_to_check(Path(), "gpt2-mechanisms"), "mla").chosen[0]
    several = {"GPUS": 2, "GLOBAL_BATCH": 2 * case.config.train.global_batch}
    case = replace(
        case, config=with_changes(case.config, DATA_PARALLEL="fsdp", COMPILE=False, **several)
    )
    with CheckContext() as context:
        assert list(process_checks.check_parallel(StepUnderTest(case, context))) == []
    # Each rank trains on its share alone.
    monkeypatch.setattr(ProcessGroup, "shard", lambda self, module, blocks, device: module)
    with CheckContext() as context:
        findings = list(process_checks.check_parallel(StepUnderTest(case, context)))
    assert {finding.property for finding in findings} == {"same-gradient"}
