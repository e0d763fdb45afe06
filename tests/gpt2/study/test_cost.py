"""Expected time and memory of runs: a share of a GPU's peak, and steps measured on this machine."""

import json
import subprocess

import pytest

from gpt2.study import cost
from gpt2.study import view as planning_view
from gpt2.study.cost import GPU_SHARE
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.env.gpu import GPUS
from lib.errors import KablateError, PreflightError, Problem, RunError
from tests.errors import error_of

BF16 = {"PRECISION_BF16": True, "PRECISION_WHY": "a test", "ATTENTION_BACKEND_TRITON": True}
ON_GPU = {"DEVICE_CUDA": True, "DEVICE_CPU": None, **BF16}
STUDY = {"RA_MLA_ABLATION_MODE": True}
STEP = {"device": "a CPU", "step_seconds": 0.5, "timed_steps": 10, "timed_micro_batches": 1}
STEP |= {"evaluation_seconds": 2.0}


def predicted(monkeypatch, peak):
    """Replace the process that predicts the memory."""

    def predict(target, values):
        return subprocess.CompletedProcess([], 0, json.dumps([peak for _ in values]))

    monkeypatch.setattr(cost, "run_predict", predict)


def test_a_gpu_that_is_elsewhere_reaches_a_stated_share_of_its_peak(planned, monkeypatch):
    predicted(monkeypatch, 2**30)
    plan = planned(steps="0,5", seeds="1,2", **STUDY, **ON_GPU, GPUS=2, GRAD_ACCUMULATION=4)
    assert planning_view.look(plan)[0]["seconds"] is None
    views = planning_view.look(plan, "H100 80GB")
    speed = GPU_SHARE * GPUS["h100"].tflops["bf16"] * 1e12 * 2
    for view in views:
        assert view["seconds_from"] == "gpu" and view["gpu"] == "h100"
        assert view["seconds"] == pytest.approx(view["tokens"] * view["flops_per_token"] / speed)
    text = planning_view.plan_text(plan, views)
    assert " ~" in text and "at 25 % of the peak of h100, within a factor of two" in text
    assert "memory" in text.splitlines()[0] and "PROBE=1" in text
    document = json.loads(planning_view.to_json(plan, views))["runs"][0]
    assert document["peak_bytes"] == 2**30 and document["probe"] is None


def test_attention_that_reaches_less_gets_no_time(planned, forked_modules):
    by_rows = ON_GPU | {"ATTENTION_BACKEND_TRITON": None, "ATTENTION_BACKEND_ROWS": True}
    plan = planned(**by_rows, seeds="1,2")
    view, other = planning_view.look(plan, "h100")
    assert (view["seconds"], view["seconds_from"]) == (None, "unknown")
    # Seeds share a prediction of the memory.
    assert view["peak_bytes"] == other["peak_bytes"] > 4 * 4 * view["parameters"]
    assert "reaches less" in planning_view.plan_text(plan, [view, other])


def test_a_step_that_is_too_large_is_marked(planned, monkeypatch):
    predicted(monkeypatch, 90 * 2**30)
    plan = planned(**ON_GPU)
    text = planning_view.plan_text(plan, planning_view.look(plan, "h100"))
    assert "90.0 GiB (too large)" in text
    assert "too large" not in planning_view.plan_text(plan, planning_view.look(plan, "h200"))


@pytest.mark.parametrize(
    ("gpu", "code"), [("gtx9999", "gpu.unknown-name"), ("v100-16", "gpu.unknown-peak")]
)
def test_a_gpu_without_a_known_peak_is_an_error(planned, gpu, code):
    assert error_of(planning_view.look, planned(**ON_GPU), gpu).codes == [code]


def probed(monkeypatch, *outcomes):
    """Replace the workers of a probe by given outcomes; return the list of their configurations."""
    configs = []
    left = iter(outcomes)

    class FakeExecutor:
        def submit_call(self, function, config, *rest, **options):
            configs.append(config)

        def result(self, job, seconds):
            if isinstance(outcome := next(left), KablateError):
                raise outcome
            return outcome

    monkeypatch.setattr(cost, "LocalExecutor", lambda *given: FakeExecutor())
    return configs


def test_each_distinct_model_is_timed_once(planned, monkeypatch, capfd):
    fast, slow = STEP, {**STEP, "step_seconds": 1.0}
    configs = probed(monkeypatch, fast, slow)
    plan = planned(steps="0,5", seeds="1-3", **STUDY, VERDICT_AA=False, EVAL_INTERVAL=25)
    views = planning_view.look(plan, probe=True)
    assert [config.seed for config in configs] == [1, 1] and len(views) == 6
    # 100 steps, and evaluations after 25, 50, 75 and 100 of them.
    assert [view["seconds"] for view in views] == [58.0, 108.0] * 3
    assert {view["seconds_from"] for view in views} == {"probe"} and views[0]["evaluations"] == 4
    progress = [line for line in capfd.readouterr().err.splitlines() if "PROBE" in line]
    assert len(progress) == 3 and "1/2" in progress[1] and "eta" in progress[1]
    text = planning_view.plan_text(plan, views)
    assert "measured on a CPU: 2 models, each alone, medians of at least 10 steps" in text
    assert "~" not in text
    # 64 sequences of 128 tokens.
    assert "step ms" in text.splitlines()[0] and " 500.0 " in text and " 16.4k " in text
    document = json.loads(planning_view.to_json(plan, views))["runs"][1]
    assert document["probe"] == slow and document["seconds"] == 108.0


def test_only_what_changes_the_time_of_a_step_is_timed_again(tree):
    same = ({}, {"SEED": 7}, {"LEARNING_RATE": "3e-4"}, {"MAX_ITERS": 200}, {"EVAL_INTERVAL": 3})
    other = ({"DROPOUT": "0.2"}, {"BLOCK_SIZE": 64}, {"GRAD_CHECKPOINTING": True}, {"N_LAYER": 3})
    other += ({"OPTIMIZER_SGD": True}, {"CPU_THREADS": 2}, {"EVAL_TOKENS": 4096})
    base = {"DEVICE_CPU": True, "CPU_THREADS": 1, "MODEL_SIZE_CUSTOM": True, "N_EMBD": 96}
    base |= {"N_HEAD": 4}
    layers = [ConfigLayer.of("defconfig", "test", {**base, **change}) for change in (*same, *other)]
    keys = [cost._probe_key(resolve_config(tree, [layer])) for layer in layers]
    assert len(set(keys[: len(same)])) == 1 and len(set(keys)) == 1 + len(other)


def test_a_model_that_cannot_be_timed_is_named(planned, monkeypatch):
    memory = RunError(Problem("out of memory", code="run.out-of-memory"))
    late = RunError(Problem("no answer within 300 s", code="worker.no-answer"))
    probed(monkeypatch, memory, late, STEP)
    plan = planned(steps="0,2,5", **STUDY)
    first, second, third = views = planning_view.look(plan, probe=True)
    assert first["seconds"] is second["seconds"] is None and third["seconds"] == 52.0
    text = planning_view.plan_text(plan, views)
    assert f"{first['label']}: not measured: out of memory" in text
    assert f"{second['label']}: not measured: no answer within 300 s" in text
    # A missing device is one error.
    probed(monkeypatch, PreflightError(Problem("no GPU", code="gpu.missing")))
    with pytest.raises(PreflightError, match="no GPU"):
        planning_view.look(plan, probe=True)
