"""Observed settings of a run, and the error of a strict profile if they deviate."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gpt2.attention.sdpa_kernels import observed_sdpa_kernel, selected_sdpa_kernel
from gpt2.training.loop import open_session
from gpt2.training.manifest import attention_kernel, observed_settings
from gpt2.training.state import TrainingSession
from lib.env.observe import deviations, require_no_deviations
from lib.errors import PreflightError

FAST = {"RUN_PROFILE_MAXOUT_SPEED": True}
MIXED = {"ATTENTION_BACKEND_MATH": True, "MLP_CROSS_TOKEN": True}


def observed(session: TrainingSession) -> dict[str, Any]:
    return {name: state["observed"] for name, state in observed_settings(session).items()}


def test_attention_is_recorded_by_form_and_shape(session):
    rows = observed(session())
    assert (rows["attention_impl"], rows["sdpa_backend_selected"]) == ("rows", {})
    # With dropout to train and without it to evaluate, two shapes.
    math = observed(session(ATTENTION_BACKEND_MATH=True))
    assert math["sdpa_backends_allowed"] == ["math"] and math["attention_impl"] == "sdpa"
    assert math["sdpa_backend_selected"] == {
        "2x16x8, dropout 0.2": "math",
        "2x16x8, dropout 0": "math",
    }
    flash = observed(session(DROPOUT="0.0"))
    assert flash["sdpa_backend_selected"] == {"2x16x8, dropout 0": "flash"}
    assert flash["flash_attention_enabled"] and flash["sdpa_backends_allowed"] == ["flash"]


@pytest.mark.parametrize(("window", "masked"), [(512, True), (4096, False)])
def test_a_cpu_shows_its_kernel_on_a_piece_of_a_long_sequence(
    configure, monkeypatch, window, masked
):
    asked: list[tuple[int, bool]] = []
    real = F.scaled_dot_product_attention

    def attend(q: torch.Tensor, *given: torch.Tensor, **named: Any) -> torch.Tensor:
        asked.append((q.shape[2], "attn_mask" in named))
        return real(q, *given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    sliding = {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": window}
    model = configure(BLOCK_SIZE=4096, **sliding).model
    for dropout, kernel in ((0.0, "flash"), (0.2, "math")):
        assert observed_sdpa_kernel(model, "fp32", torch.device("cpu"), dropout) == kernel
        assert selected_sdpa_kernel(model, "fp32", torch.device("cpu"), dropout) == kernel
    # The mask is needed if the whole sequence has one, even if the chunk is within the window.
    assert asked == [(128, masked)] * 2


def test_the_backend_of_sparse_attention_is_recorded(session):
    sizes = {"NSA_COMPRESS_BLOCK": 4, "NSA_COMPRESS_STRIDE": 2, "NSA_SELECT_BLOCK": 4}
    named = {"DROPOUT": "0.0", "ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 1}
    sparse = {"ATTENTION_PATTERN_NSA": True, **named, **sizes}
    by_default = {"requested": "auto", "resolved": "blocks", "observed": "blocks"}
    assert observed_settings(session(**sparse))["nsa_backend"] == by_default
    assert observed(session(**sparse, NSA_BACKEND_GATHER=True))["nsa_backend"] == "gather"
    assert observed(session())["nsa_backend"] == "none"


def test_another_kernel_than_the_pinned_one_is_a_deviation(session, monkeypatch):
    """The pinned kernel is not the one that runs."""
    pinned = session(ATTENTION_BACKEND_MATH=True, DROPOUT="0.0")
    assert attention_kernel(pinned) == "sdpa math"
    assert deviations(observed_settings(pinned)) == []
    monkeypatch.setattr("gpt2.attention.sdpa.only_backend", lambda backend: nullcontext())
    found = observed_settings(pinned)
    assert found["sdpa_backend_selected"] == {
        "requested": "math",
        "resolved": {"2x16x8, dropout 0": "math"},
        "observed": {"2x16x8, dropout 0": "flash"},
    }
    assert {"sdpa_backend_selected", "flash_attention_enabled"} <= {*deviations(found)}
    assert attention_kernel(pinned) == "sdpa flash"
    with pytest.raises(PreflightError, match="sdpa_backend_selected: .*setting-mismatch"):
        require_no_deviations(observed_settings(pinned))


def test_observing_the_kernel_does_not_use_generators(session):
    opened = session(**FAST)
    before = torch.get_rng_state()
    assert observed(opened)["sdpa_backend_selected"]["2x16x8, dropout 0.2"] == "math"
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_of_built_components_are_observed(session):
    opened = session(GRAD_CHECKPOINTING=True, LOADER_WORKERS=2, PREFETCH_FACTOR=3)
    found = observed_settings(opened)
    assert found["gradient_checkpointing_enabled"]["observed"]
    loader = ("num_workers", "prefetch_factor", "persistent_workers")
    assert [found[name]["observed"] for name in loader] == [2, 3, True]
    # Page-locked memory requires a GPU.
    assert found["pin_memory"] == {"requested": True, "resolved": False, "observed": False}
    opened.model.grad_checkpointing = False
    assert deviations(observed_settings(opened)) == ["gradient_checkpointing_enabled"]


@pytest.mark.slow
def test_a_compiled_model_is_observed(configure, session, monkeypatch):
    """The compiled model is not run, because compilation takes minutes."""
    compiled = session(COMPILE=True)
    found = observed(compiled)
    assert found["torch_compile_enabled"] and found["torch_compile_backend"] == "inductor"
    compiled.forward = compiled.model
    assert {"torch_compile_enabled", "torch_compile_mode"} <= set(
        deviations(observed_settings(compiled))
    )
    plain = observed(session())
    assert plain["torch_compile_enabled"] is False and plain["torch_compile_backend"] is None


def test_a_strict_run_with_a_deviation_fails_before_its_first_step(configure, train, monkeypatch):
    """The precision is changed after the session is opened."""

    def behind(*arguments: Any) -> TrainingSession:
        opened = open_session(*arguments)
        torch.set_float32_matmul_precision("medium")
        return opened

    monkeypatch.setattr("gpt2.training.loop.open_session", behind)
    with pytest.raises(
        PreflightError, match="float32_matmul_precision: .*expected highest.*setting-mismatch"
    ):
        train(configure())
    done = train(configure(**FAST, MATMUL_PRECISION_HIGHEST=True, MAX_ITERS=1), "fast")
    assert done.manifest()["deviations"] == ["float32_matmul_precision", "allow_tf32_matmul"]
