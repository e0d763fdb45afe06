"""Selection of the attention backend, and configurations rejected before a run starts."""

from dataclasses import replace

import pytest
import torch

from gpt2.attention.backends import gpu_notes
from gpt2.model import GPT, Execution
from gpt2.running.kernel_checks import check_attention
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.options import MachineConfig
from lib.errors import ConfigError, PreflightError
from tests.gpt2.builders import make_model_config

CPU = MachineConfig("cpu", "fp32", 1, False, True, "highest", False, False, 0, "ddp", False)
ENTROPY = {"ra_cross_token": {"mode": "entropy"}}
TOPK = {"ra_cross_token": {"mode": "topk"}}
RA = {"terms": ("reciprocal",)}


def gated(parts):
    return {"gates": ("ra_cross_token",), "parts": parts}


def form(model, place):
    (chosen,) = model.backends(place)
    return chosen


def wide(**given):
    return make_model_config(n_embd=64, **given)


MANY = {"ra_cross_token": {"topk": 64}}


@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("given", "expected", "auto_on_gpu"),
    [
        ({}, "sdpa", "sdpa"),
        ({"pattern": "sliding"}, "sdpa", "sdpa"),
        (RA, "rows", "triton"),
        (RA | {"dropout": 0.1}, "rows", "triton"),
        (gated(ENTROPY), "rows", "triton"),
        (gated(TOPK), "rows", "triton"),
        (RA | {"mechanisms": ("mlp_cross_token",)}, "rows", "triton"),
        # Features that the Triton kernels do not support.
        (gated(MANY), "rows", "rows"),
        (RA | {"n_embd": 4 * 160}, "rows", "rows"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
def test_a_kernel_is_for_plain_attention_and_rows_for_the_rest(
    given, expected, auto_on_gpu, place, backend
):
    model = make_model_config(**{"n_embd": 64, **given}, attention_backend=backend)
    chosen = auto_on_gpu if backend == "auto" and place == "gpu" else expected
    assert form(model, place) == chosen


def test_auto_does_not_select_triton_on_an_old_gpu():
    model = wide(**RA, attention_backend="auto")
    assert form(model, "gpu without kernels") == "rows"
    with pytest.raises(ConfigError) as caught:
        form(wide(**RA, attention_backend="triton"), "gpu without kernels")
    assert caught.value.codes == ["attention.backend-unsupported"]


def test_auto_computes_by_the_kernels_that_the_device_runs():
    """A launch that is given stands for a GPU; without a GPU, the row engine computes."""
    model = GPT(wide(**RA, attention_backend="auto", dropout=0.1))
    idx = torch.zeros(1, 16, dtype=torch.long)
    launched = []
    expected = model.eval()(idx)
    model.set_execution(Execution(tile_launch=lambda name, spec, tensors: launched.append(name)))
    model(idx)
    assert launched == ["forward"] * len(model.blocks)
    model.set_execution(Execution())
    assert torch.equal(model(idx), expected)


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        (RA | {"dropout": 0.1}, 1),
        (RA, 1),
        (RA | {"attention_backend": "triton"}, 0),
        (RA | {"attention_backend": "rows"}, 1),
        ({"dropout": 0.1}, 0),
        (gated(TOPK), 1),
        (RA | {"mechanisms": ("mlp_cross_token",)}, 1),
        # Features that the Triton kernels do not support.
        (RA | {"n_embd": 4 * 160}, 1),
        (gated({"ra_cross_token": {"topk": 64}}), 1),
    ],
)
def test_a_note_states_that_another_backend_would_be_faster_on_a_gpu(given, notes):
    model = make_model_config(**{"n_embd": 64, **given})
    assert len(gpu_notes(model.attention, model.shape, model.backends("gpu"))) == notes


@pytest.mark.parametrize(
    ("projection", "pattern"), [("dense", "full"), ("grouped", "sliding"), ("latent", "full")]
)
@pytest.mark.parametrize("backend", ["auto", "flash", "math", "rows"])
def test_supported_configurations_pass(projection, pattern, backend):
    given = dict(projection=projection, pattern=pattern, attention_backend=backend)
    model = make_model_config(**given)
    check_attention(model, CPU)
    GPT(model)(torch.zeros(1, 16, dtype=torch.long))


@pytest.mark.parametrize(
    ("given", "machine"),
    [
        (dict(attention_backend="flash", dropout=0.5), CPU),
        (dict(attention_backend="efficient"), CPU),
        (dict(attention_backend="efficient", projection="grouped"), replace(CPU, precision="bf16")),
    ],
)
def test_a_kernel_that_torch_cannot_run_is_rejected(given, machine):
    with pytest.raises(PreflightError) as caught:
        check_attention(make_model_config(**given), machine)
    assert caught.value.codes == ["attention.backend-unsupported"]
    symbol = f"ATTENTION_BACKEND_{given['attention_backend']}".upper()
    assert caught.value.problems[0].where == symbol


@pytest.mark.parametrize("backend", ["", "flash", "rows"])
def test_a_pattern_with_its_own_kernel_ignores_the_backend(backend):
    parts = {"projection": "grouped", "pattern": "nsa"}
    assert form(make_model_config(**parts, attention_backend=backend), "cpu") == "own"


def test_kconfig_hides_the_backend_for_a_pattern_with_its_own_kernel():
    nsa = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    tree = KconfigTree()
    values = tree.resolve([ConfigLayer.of("defconfig", "test", nsa)]).values
    assert values["ATTENTION_BACKEND"] == ""
    with pytest.raises(ConfigError, match="ATTENTION_BACKEND_ROWS"):
        tree.resolve([ConfigLayer.of("defconfig", "test", nsa | {"ATTENTION_BACKEND_ROWS": True})])
