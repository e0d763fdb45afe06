"""Quantization against plain loops and published tables, and the set of quantized weights."""

import importlib.util
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.check.cases import plan_cases
from gpt2.check.command import check_and_report
from gpt2.model import GPT
from gpt2.quantized.codes import decode, encode
from gpt2.quantized.evaluate import quantize
from gpt2.quantized.options import SCHEMES, parse_schemes
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, PreflightError
from tests.gpt2.builders import needs_bitsandbytes

# The values that four bits of NormalFloat stand for (Dettmers et al. 2023, appendix E).
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
# Sign, two bits of exponent, one of mantissa, over the largest of them, 12.
FP4 = [s * m / 12 for s in (1, -1) for m in (0, 0.0625, 2, 3, 4, 6, 8, 12)]
SETTINGS: dict[str, Any] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 16,
    "BLOCK_SIZE": 16,
    "TOKENIZER_BYTE": True,
    "RECIPROCAL": True,
}


@pytest.fixture
def model() -> GPT:
    """Build a model with a mechanism and random weights."""
    built = GPT(resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", SETTINGS)]).model)
    built.init_weights(seed=1)
    return built


def weight() -> Tensor:
    """Return a matrix with a row of zeros and a row with one dominant element."""
    weight_OI = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)) * 0.02
    weight_OI[2] = 0.0
    weight_OI[4, 7] = -3.0
    return weight_OI


def test_int8_is_the_nearest_of_255_steps_of_each_row():
    codes, scales = encode(weight(), "int8")
    values = decode(codes, scales, "int8", 5, 24)
    for row, rounded in zip(weight().double().tolist(), values.tolist(), strict=True):
        step = max(map(abs, row)) / 127
        for number, found in zip(row, rounded, strict=True):
            expected = round(number / step) * step if step else 0.0
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)
            assert abs(found - number) <= step / 2 * (1 + 1e-5)
    assert codes.nbytes + scales.nbytes == 5 * 24 + 5 * 4
    assert torch.equal(encode(values, "int8")[0], codes)


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize(("scheme", "table"), [("nf4", NF4), ("fp4", FP4)])
def test_four_bits_are_the_published_values_times_a_blocks_largest(model, scheme, table):
    before = model.h[0].mlp.c_fc.weight.detach().clone().flatten()
    quantize(model, scheme)
    after = model.h[0].mlp.c_fc.weight.detach().flatten()
    for first in range(0, before.numel(), 64):
        block, rounded = before[first : first + 64], after[first : first + 64]
        largest = block.abs().max()
        allowed = torch.tensor(table) * largest
        nearest = (rounded[:, None] - allowed).abs().min(1).values
        assert nearest.max() <= 1e-4 * largest
        # Never further off than half of the widest gap, give or take where a tie is cut.
        gaps = torch.tensor(sorted(table)).diff().max()
        assert (rounded - block).abs().max() <= 0.51 * gaps * largest
    assert len(after[:64].unique()) <= 16


@pytest.mark.parametrize(
    "scheme",
    ["none", "int8", pytest.param("nf4", marks=needs_bitsandbytes)],
)
def test_only_matrices_of_the_blocks_are_quantized(model, scheme):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = quantize(model, scheme)
    labels = {"none": (False, "none"), "int8": (True, "int8"), "nf4": (True, "4bit_nf4")}
    assert (found["quantization_enabled"], found["quantization_scheme"]) == labels[scheme]
    assert (
        (found["bnb_version"] is None) == (found["bnb_double_quant"] is None) == (scheme != "nf4")
    )
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    kinds = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    matrices = {f"h.{i}.{kind}.weight" for i in range(2) for kind in kinds}
    assert changed == (set() if scheme == "none" else matrices)
    numbers = sum(before[name].numel() for name in changed)
    assert found["quantized_parameters"] == numbers
    assert found["full_precision_parameters"] == model.num_params() - numbers
    rows = sum(before[name].size(0) for name in changed)
    blocks = sum(math.ceil(before[name].numel() / 64) for name in changed)
    packed = {"none": 0, "int8": numbers + 4 * rows, "nf4": numbers / 2 + 4 * blocks}[scheme]
    assert found["stored_bytes"] == packed + 4 * found["full_precision_parameters"]


def test_schemes_are_parsed_and_a_missing_package_is_one_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert parse_schemes("") == ["none"]
    assert parse_schemes("none, int8 none") == ["none", "int8"]
    with pytest.raises(ConfigError) as unknown:
        parse_schemes("int4")
    assert unknown.value.codes == ["usage.invalid-value"]
    assert all(name in str(unknown.value) for name in ("QUANT", "'int4'", *SCHEMES))
    with pytest.raises(PreflightError) as caught:
        parse_schemes("int8,fp4,nf4")
    assert caught.value.codes == ["env.missing-package"] and caught.value.exit_code == 3
    assert "QUANT: fp4 " in str(caught.value)
    assert "make setup EXTRAS=bitsandbytes" in str(caught.value)


def test_a_missing_package_of_a_base_is_one_error(monkeypatch, tmp_path):
    """Of a check before it begins, and wherever the codes of a run are read."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    adapters = {"PRUNING_NONE": True, "LORA": True, "LORA_BASE_FP4": True, "INIT_FROM": "run:base"}
    settings = {**SETTINGS, **adapters, "SINGLE_TRAINING": True, "DEVICE_CPU": True}
    with pytest.raises(PreflightError) as caught:
        check_and_report(plan_cases([ConfigLayer.of("test", "test", settings)]), tmp_path)
    assert "LORA_BASE: fp4 requires the missing package" in str(caught.value)
    with pytest.raises(PreflightError) as caught:
        encode(torch.ones(2, 2), "nf4")
    assert "make setup EXTRAS=bitsandbytes" in str(caught.value) and caught.value.exit_code == 3
