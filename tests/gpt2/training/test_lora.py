"""LoRA: the base is frozen, in fp32 or in codes; runs resume, are merged, and start others."""

import json

import pytest
import safetensors.torch
import torch

from gpt2.config import refuse_adapters_without_base
from gpt2.model import GPT
from gpt2.quantized.evaluate import evaluate_run
from gpt2.quantized.options import missing_package
from gpt2.records.audit import audit
from gpt2.weights.convert import merged_tensors
from gpt2.weights.trained import load_run
from lib.errors import ConfigError
from tests.gpt2.builders import needs_bitsandbytes

LORA = {
    "PRUNING_MAGNITUDE": None,
    "PRUNING_FREQUENCY": None,
    "LORA": True,
    "LORA_RANK": 2,
    "LORA_DROPOUT": "0.3",
}
# One step that changes nothing.
NO_STEP = {"MAX_ITERS": 1, "LEARNING_RATE": "0", "MIN_LEARNING_RATE": "0"}
BASES = ["FP32", "INT8", pytest.param("NF4", marks=needs_bitsandbytes)]


@pytest.fixture
def adapted(configure, trained):
    """Return a function that configures adapters on the trained run, with changes."""

    def build(**changes):
        return configure(**{**LORA, "INIT_FROM": f"run:{trained.files.path}", **changes})

    return build


@pytest.mark.parametrize("base", BASES)
def test_adapters_alone_are_trained_and_a_stopped_run_continues(
    adapted, train, trained, base, build_dir
):
    config = adapted(**{f"LORA_BASE_{base}": True})
    whole = train(config, "whole")
    train(config, "run", stop_at=5)
    continued = train(config, "run")
    assert continued.core() == whole.core()

    before = safetensors.torch.load_file(trained.files.weights)
    after = safetensors.torch.load_file(whole.files.weights)
    frozen = {name for name in after if ".adapter." not in name}
    adapters = after.keys() - frozen
    assert len(adapters) == 2 * 4 * 2 and all(after[name].any() for name in adapters)
    kept = frozen & before.keys()
    assert all(torch.equal(after[name], before[name]) for name in kept)
    codes = {name for name in frozen - kept if ".codes." in name}
    assert frozen - kept == codes and len(codes) == (0 if base == "FP32" else 2 * 4 * 2)
    assert len(before.keys() - kept) == len(codes) / 2

    # An element in a code is a parameter, a scale is none.
    count = json.loads(whole.files.summary.read_text())["final"]["parameters"]
    assert f"| {count:,} parameters |" in whole.files.logs.read_text()
    assert audit(whole.files, build_dir).valid

    knobs = whole.manifest()["knobs"]
    observed = {n: knob["observed"] for n, knob in knobs.items() if n.startswith(("quant", "bnb"))}
    four_bits = {"bnb_compute_dtype": "float32", "bnb_double_quant": False}
    scheme = {"FP32": "none", "INT8": "int8", "NF4": "4bit_nf4"}[base]
    expected = {"quantization_enabled": base != "FP32", "quantization_scheme": scheme}
    assert observed == expected | (four_bits if base == "NF4" else {})
    assert whole.summary()["final"]["parameters"] == config.model.num_params()
    # Adapters of rank 2 beside c_attn, both c_proj and c_fc, whose widths are 16, 48 and 64.
    assert config.model.num_params() - config.model.base_params() == 2 * 2 * (64 + 32 + 80 + 80)

    text = whole.files.summary.read_text()
    whole.files.summary.write_text(text.replace(f": {count},", f": {count + 1},"))
    findings = [str(finding) for finding in audit(whole.files, build_dir).findings]
    assert f"model.safetensors: expected parameters {count + 1}, found {count}" in findings


@pytest.mark.parametrize("base", BASES)
def test_merged_weights_compute_the_same_and_start_another_run(adapted, train, base):
    run = train(adapted(**{f"LORA_BASE_{base}": True}, MAX_ITERS=3)).files
    ours, idx_BT = load_run(run.path), torch.arange(12)[None]
    plain = GPT(adapted(LORA=None, LORA_RANK=None, LORA_DROPOUT=None).model).eval()
    plain.load_state_dict(merged_tensors(run.path))
    assert torch.allclose(plain(idx_BT), ours(idx_BT), rtol=0, atol=1e-5)
    second = train(adapted(INIT_FROM=f"run:{run.path}", **NO_STEP), "second")
    begun = load_run(second.files.path)
    assert torch.allclose(begun(idx_BT), ours(idx_BT), rtol=0, atol=1e-5)


@torch.no_grad()
def test_dropout_zeroes_inputs_of_the_adapters_in_training_only(adapted):
    model = GPT(adapted(DROPOUT="0.0").model)
    model.init_weights(1)
    layer = model.h[0].mlp.c_fc
    torch.nn.init.ones_(layer.adapter.up.weight)
    torch.nn.init.ones_(layer.adapter.down.weight)
    x = torch.ones(400, 16)
    added = layer(x) - torch.nn.functional.linear(x, layer.weight, layer.bias)
    # α/r = 16/2; each of 16 inputs is 0, or 1 / 0.7 times itself; both columns of B add up.
    kept = added[:, 0] / 8 / 2 * 0.7
    assert torch.allclose(kept, kept.round(), atol=1e-4) and kept.min() < 16
    assert kept.mean() == pytest.approx(16 * 0.7, rel=0.05)
    assert torch.allclose(layer.eval()(x) - layer(x), torch.zeros(()))
    added = layer(x) - torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.allclose(added, torch.full_like(added, 16 * 2 * 8.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"LORA_RANK": 17}, "LORA_RANK: expected at most N_EMBD=16, got 17"),
        (
            {
                f"LORA_{part}": False
                for part in ("ATTENTION_IN", "ATTENTION_OUT", "MLP_IN", "MLP_OUT")
            },
            "LORA_MLP_IN: n, as all other LORA_ projections",
        ),
        (
            {"DATA_PARALLEL_FSDP": True, "GPUS": 2, "BATCH_SIZE": 1},
            "DATA_PARALLEL_FSDP: y with LORA",
        ),
        (
            {"LORA_BASE_INT8": True, "COMPILE": True, "DEVICE_CPU": None},
            "COMPILE: y with LORA_BASE",
        ),
        ({"PRUNING_MAGNITUDE": True}, "LORA"),
    ],
)
def test_settings_that_adapters_cannot_have(adapted, changes, words):
    with pytest.raises(ConfigError) as error:
        adapted(**changes)
    assert words in str(error.value)


def test_adapters_need_a_trained_base(adapted, train, trained):
    with pytest.raises(ConfigError) as error:
        refuse_adapters_without_base([adapted(INIT_FROM="")])
    assert error.value.codes == ["config.no-base"] and "SET=INIT_FROM=run:" in str(error.value)
    with pytest.raises(ConfigError) as error:
        train(adapted(RECIPROCAL=True, RECIPROCAL_LEARNABLE=True))
    assert "has no reciprocal (random and frozen)" in str(error.value)
    (problem,) = missing_package(["fp32", "nf4"], "LORA_BASE") or [None]
    assert problem is None or "EXTRAS=bitsandbytes" in problem.next


def test_a_base_in_codes_is_not_quantized_again(adapted, train, build_dir):
    config = adapted(LORA_BASE_INT8=True, MAX_ITERS=1)
    run = train(config).files
    with pytest.raises(ConfigError) as error:
        evaluate_run(run, config, build_dir, "nf4")
    assert "nf4 of a run with LORA_BASE=int8" in str(error.value)
    found = evaluate_run(run, config, build_dir, "none")["quantization"]
    assert (found["quantization_scheme"], found["quantized_parameters"]) == ("int8", 2 * 12 * 16**2)
    recorded = json.loads(run.summary.read_text())["final"]["val_loss"]
    assert (
        json.loads(run.evaluation("none").joinpath("summary.json").read_text())["final"]["val_loss"]
        == recorded
    )
