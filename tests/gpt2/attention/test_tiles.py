"""The Triton kernels of attention, in Triton's interpreter.

The interpreter computes products of bfloat16 wrongly, so fp32 and fp16 are tested. It runs in a process
of its own: triton reads the variable that enables the interpreter when it is imported.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from gpt2.attention.attention import attend_rows
from gpt2.attention.backends import choose_backend
from gpt2.attention.triton import runs_tiles
from gpt2.loss import fused_loss
from gpt2.model import GPT
from gpt2.running import kernel_checks
from gpt2.running.kernel_checks import check_attention
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, PreflightError, RunError
from tests.gpt2.attention.test_forms import CPU
from tests.gpt2.builders import (
    EVERYTHING,
    make_model_config,
    needs_interpreter,
    needs_triton,
)

# Relative to the norm; the gradient of a gate is the difference of nearly equal sums.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3}
# Bytes that a thread may spill if heads have 128 elements: eight registers.
SPILLED = 32
# Architecture → bytes of shared memory that a program may use: compute capability (CUDA C++
# Programming Guide, table of technical specifications), or ISA and its local data share.
SHARED_BYTES = {
    # A100; L4, L40S, RTX 4090 and, as sm_86, A10G; H100, H200; B200; RTX 5090.
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    # MI300X; W7900.
    "gfx942": 64 * 1024,
    "gfx1100": 64 * 1024,
}


def printed(module, interpret, *arguments):
    """Return the JSON lines that a module of this folder prints."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.gpt2.attention.{module}", *arguments]
    # The fusion is the default, of which triton 3.9 warns.
    environment = {"TRITON_DEFAULT_FP_FUSION": "1", **os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def interpreted(*arguments):
    """Return the object that a measurement of ``interpreted.py`` prints."""
    (found,) = printed("interpreted", "1", *arguments)
    return found


@needs_interpreter
@pytest.mark.slow
def test_compositions_dropout_and_largest_values():
    """In one process: two compositions equal the row engine, and dropout acts on the values alone.

    It follows seed, layer, head and sequence.
    """
    found = interpreted("quick")
    errors = found["compositions"].values()
    assert max(error for each in errors for error in each) <= TOLERANCES["float32"]
    dropout = found["dropout"]
    # Five standard errors of a share of independent pairs.
    standard_errors = 5 * (0.25 / dropout["pairs"]) ** 0.5
    assert abs(dropout["share"] - 0.7) < standard_errors
    assert dropout["same"] and not dropout["hidden"]
    assert all(abs(each - 0.58) < 2 * standard_errors for each in dropout["agreement"])
    assert max(dropout["errors"]) <= TOLERANCES["float32"]
    assert set(found["largest"].values()) == {True}


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_composition_equals_the_row_engine(dtype):
    found = interpreted("compositions", dtype)
    assert len(found) == 40
    assert {n: e for n, e in found.items() if not all(x <= TOLERANCES[dtype] for x in e)} == {}


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_half_precision_fits_absent_gpus(architecture):
    """Also the kernels of native sparse attention."""
    rows = printed("ahead", "0", architecture, "bf16")
    passes = ["forward", "row_gradients", "column_gradients"]
    ra = [row["kernel"] for row in rows if row["shape"] == ["ra", 64]]
    assert ra == passes
    all_passes = {*passes, "mean_weights", *(f"{name}, no values" for name in passes)}
    sparse = {"band_forward", "inner_products", "band_query_gradients", "key_gradients"}
    sparse |= {"rank", "block_forward", "combine", "reduce"}
    assert {row["kernel"] for row in rows} == all_passes | sparse
    # Other releases of triton spill more; the newest GPUs a few bytes, and gfx1100 many.
    counted = architecture not in ("sm_100", "sm_120", "gfx1100")
    counted = counted and version("triton").startswith("3.9.")
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[architecture], row
        # Heads of 128 elements, and AMD's compiler, exceed the registers by a few.
        is_tight = 128 in row["shape"] or architecture == "gfx942"
        allowed = SPILLED if is_tight else 0
        assert row["spilled_bytes"] <= allowed or not counted, row
        assert row["registers"] > 0


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_89", "gfx942"])
def test_single_precision_fits_absent_gpus(architecture):
    """It may spill registers: slow, not wrong."""
    rows = printed("ahead", "0", architecture, "fp32")
    assert {row["kernel"] for row in rows} >= {"key_gradients", "row_gradients"}
    assert max(row["shared_bytes"] for row in rows) <= SHARED_BYTES[architecture]


@needs_interpreter
@pytest.mark.long
def test_a_model_with_the_kernels_is_one_graph_to_the_compiler():
    found = interpreted("compiled")
    assert len(found) == 2 and max(found.values()) <= 1e-6


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"gates": ("ra_cross_token",), "parts": {"ra_cross_token": {"topk": 33}}}, "TOPK=33"),
        ({"n_embd": 4 * 129}, "head dim 129"),
        ({"terms": ("reciprocal", "reciprocal")}, "several score terms"),
        ({"gates": ("ra_cross_token", "ra_cross_token")}, "several gates"),
    ],
)
def test_unsupported_features_are_refused_by_name(given, feature):
    model = make_model_config(**given, attention_backend="triton")
    with pytest.raises(ConfigError) as caught:
        choose_backend(model.attention, model.shape, False, "gpu")
    assert caught.value.codes == ["attention.backend-unsupported"]
    assert feature in caught.value.problems[0].what
    assert "SET=ATTENTION_BACKEND_ROWS=y" in caught.value.problems[0].next


@needs_triton
def test_a_cpu_is_refused_before_and_in_a_run():
    model = make_model_config(terms=("reciprocal",), attention_backend="triton")
    with pytest.raises(PreflightError) as caught:
        check_attention(model, CPU)
    assert caught.value.codes == ["gpu.unsupported"]
    with pytest.raises(RunError) as caught:
        GPT(model)(torch.zeros(1, 16, dtype=torch.long))
    assert caught.value.codes == ["gpu.unsupported"]


def by_rows(answer):
    """Return a kernel that changes head outputs of the row engine by ``answer``, given the call."""
    calls = []

    def attend(qkv, plan):
        calls.append(plan)
        result = attend_rows(qkv, plan)
        return replace(result, context_BNTH=answer(len(calls), result.context_BNTH))

    attend.calls = calls
    return attend


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda call, context: context, None),
        # Always wrong, a race, and no number.
        (lambda call, context: context * 1.01, "gpu.wrong-values"),
        (lambda call, context: context * (1 + 1e-6 * (call == 4)), "gpu.wrong-values"),
        (lambda call, context: context * torch.nan, "gpu.wrong-values"),
    ],
    ids=["equal", "wrong", "race", "nan"],
)
def test_preflight_compares_the_kernels_with_the_row_engine(monkeypatch, answer, code):
    """Without dropout, after a pass with it."""
    kernel = by_rows(answer)
    monkeypatch.setattr(kernel_checks, "attend_tiles", kernel)
    monkeypatch.setattr(kernel_checks, "tile_problem", lambda *_: None)
    given = EVERYTHING | {"dropout": 0.1}
    model = make_model_config(**given, attention_backend="triton")
    state = torch.random.get_rng_state()
    if code:
        with pytest.raises(PreflightError) as caught:
            check_attention(model, CPU)
        assert caught.value.codes == [code]
        assert "SET=ATTENTION_BACKEND_ROWS=y" in caught.value.problems[0].next
    else:
        check_attention(model, CPU)
    assert [plan.dropout for plan in kernel.calls] == [0.1, 0.0, 0.1, 0.0]
    assert all(plan.reader and plan.gates and plan.terms for plan in kernel.calls)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_kconfig_offers_the_kernels_on_a_gpu():
    tree = KconfigTree()
    chosen = {"ATTENTION_BACKEND_TRITON": True}
    with pytest.raises(ConfigError, match="DEVICE_CUDA"):
        tree.resolve([ConfigLayer.of("defconfig", "test", chosen | {"DEVICE_CPU": True})])
    gpu = chosen | {"DEVICE_CUDA": True}
    values = tree.resolve([ConfigLayer.of("defconfig", "test", gpu)]).values
    assert values["ATTENTION_BACKEND"] == "triton"


def gpu_of(monkeypatch, capability, hip=None):
    """Let torch report one GPU of a compute capability."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.hip", hip)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((7, 5), None, False), ((8, 0), None, True), ((12, 0), None, True), ((7, 5), "6.4", True)],
)
def test_gpus_that_support_the_kernels(monkeypatch, capability, hip, runs):
    device = gpu_of(monkeypatch, capability, hip)
    assert runs_tiles(device) is runs
    assert not runs_tiles(torch.device("cpu"))
    monkeypatch.setattr("gpt2.loss.tile_problem", lambda dtype, device: None)
    for package in (None, "liger-kernel"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=package: package)
        assert bool(fused_loss("auto", device)) is (runs and package is not None)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_old_gpus_attend_by_rows_or_are_refused(monkeypatch, backend):
    gpu_of(monkeypatch, (7, 5))
    compared = []
    monkeypatch.setattr(
        kernel_checks, "compare_values", lambda *args, **kwargs: compared.append(args)
    )
    monkeypatch.setattr(kernel_checks, "tile_problem", lambda dtype, device: None)
    model = make_model_config(terms=("reciprocal",), attention_backend=backend)
    if backend == "auto":
        check_attention(model, replace(CPU, device="cuda"))
    else:
        with pytest.raises(PreflightError) as caught:
            check_attention(model, replace(CPU, device="cuda"))
        assert caught.value.codes == ["gpu.unsupported"] and "7.5" in str(caught.value)
    assert not compared


def test_the_kernels_need_their_compiler(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = make_model_config(attention_backend="triton")
    with pytest.raises(PreflightError) as caught:
        check_attention(model, replace(CPU, device="cuda"))
    assert caught.value.codes == ["env.missing-package"]
