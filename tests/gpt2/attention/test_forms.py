"""Which form computes an attention, and what is refused before anything starts."""

from dataclasses import replace

import pytest
import torch

from gpt2.attention.forms import choose_form
from gpt2.attention.preflight import check_attention
from gpt2.model import GPT
from lib.errors import ConfigError, PreflightError
from lib.kconfig import Layer, Tree
from lib.machine.options import MachineConfig
from tests.gpt2.builders import make_model_config

CPU = MachineConfig("cpu", "fp32", 1, False, True, "highest", False, False, 0, False)
ENTROPY = {"ra_cross_token": {"mode": "entropy"}}
RMS = {"ra_cross_token": {"mode": "rms"}}
TOPK = {"ra_cross_token": {"mode": "topk"}}
MAX = {"ra_cross_token": {"mode": "max"}}
RA = {"terms": ("reciprocal",)}


def gated(parts):
    return {"gates": ("ra_cross_token",), "parts": parts}


def form(model, device):
    (shows,) = {model.mlp.reads_weights(site) for site in model.sites()}
    return choose_form(model.attention, model.shape, shows, device)


# Heads of 16, the narrowest that a GPU's kernels know.
def wide(**given):
    return make_model_config(n_embd=64, **given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "sdpa"),
        ({"pattern": "sliding"}, "sdpa"),
        (RA, "rows"),
        (gated(ENTROPY), "rows"),
        (gated(TOPK), "rows"),
        (RA | {"mechanisms": ("mlp_cross_token",)}, "rows"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
def test_a_kernel_is_for_plain_attention_and_rows_for_the_rest(given, expected, device, backend):
    assert form(wide(**given, attention_backend=backend), device) == expected


@pytest.mark.parametrize("given", [{}, RA | gated(TOPK), {"mechanisms": ("mlp_cross_token",)}])
def test_rows_have_every_part(given):
    assert form(wide(**given, attention_backend="rows"), "cuda") == "rows"


@pytest.mark.parametrize("given", [{}, {"pattern": "sliding"}, RA | gated(ENTROPY)])
def test_joined_is_taken_on_a_cpu_too_when_named(given):
    assert form(wide(**given, attention_backend="joined"), "cpu") == "joined"


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        (gated(TOPK), "RA_CROSS_TOKEN_MODE_TOPK"),
        (gated(MAX), "RA_CROSS_TOKEN_MODE_MAX"),
        ({"dropout": 0.1}, "DROPOUT=0.1"),
        ({"mechanisms": ("mlp_cross_token",)}, "reads attention weights"),
        (RA | {"n_embd": 32}, "heads of 8 numbers"),
    ],
)
def test_joined_passes_without_a_form_of_the_parts_are_refused(given, lacking):
    model = make_model_config(**{"n_embd": 64, **given}, attention_backend="joined")
    with pytest.raises(ConfigError, match=lacking) as refused:
        form(model, "cuda")
    assert "ATTENTION_BACKEND: " in str(refused.value)
    assert "SET=ATTENTION_BACKEND_ROWS=y" in str(refused.value)


@pytest.mark.parametrize("mechanism", ["mlp_cross_token", "mlp_latent", "mlp_attn_gate"])
def test_options_say_what_the_built_mlp_asks_for(mechanism):
    model = make_model_config(projection="latent", mechanisms=(mechanism,))
    built = GPT(model)
    for site, block in zip(model.sites(), built.h, strict=True):
        assert model.mlp.reads_weights(site) == (block.attn.reader is not None)


@pytest.mark.parametrize("projection", ["dense", "grouped", "latent"])
@pytest.mark.parametrize("pattern", ["full", "sliding"])
@pytest.mark.parametrize("backend", ["auto", "flash", "math", "rows", "joined"])
def test_what_runs_is_let_through(projection, pattern, backend):
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
def test_a_kernel_that_cannot_run_is_refused_by_asking_torch(given, machine):
    with pytest.raises(
        PreflightError, match=f"ATTENTION_BACKEND_{given['attention_backend']}".upper()
    ):
        check_attention(make_model_config(**given), machine)


def test_flex_attention_needs_its_compiler(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = wide(**RA, attention_backend="joined")
    with pytest.raises(PreflightError, match="triton is missing"):
        check_attention(model, replace(CPU, device="cuda"))
    check_attention(wide(**RA, attention_backend="rows"), replace(CPU, device="cuda"))
    check_attention(model, CPU)


@pytest.mark.parametrize("backend", ["", "flash", "rows", "joined"])
def test_a_pattern_that_attends_by_itself_heeds_no_backend(backend):
    parts = {"projection": "grouped", "pattern": "nsa"}
    assert form(make_model_config(**parts, attention_backend=backend), "cpu") == "own"


def test_kconfig_offers_no_backend_to_a_pattern_that_attends_by_itself():
    nsa = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    tree = Tree()
    values = tree.resolve([Layer.of("defconfig", "test", nsa)]).values
    assert values["ATTENTION_BACKEND"] == ""
    with pytest.raises(ConfigError, match="ATTENTION_BACKEND_ROWS=y: needs"):
        tree.resolve([Layer.of("defconfig", "test", nsa | {"ATTENTION_BACKEND_ROWS": True})])
