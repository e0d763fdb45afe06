"""Observed settings of a run, and the error of a strict profile if they deviate."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from gpt2.attention.sdpa_kernels import observed_sdpa_kernel, selected_sdpa_kernel
from gpt2.training.loop import open_session
from gpt2.training.manifest import attention_kernel, observed_settings
from lib.env.observe import deviations, require_no_deviations
from lib.errors import PreflightError

FAST = {"RUN_PROFILE_MAXOUT_SPEED": True}
SPARSE = {"ATTENTION_PATTERN_NSA": True, "ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 1}
SPARSE |= {"NSA_COMPRESS_BLOCK": 4, "NSA_COMPRESS_STRIDE": 2, "NSA_SELECT_BLOCK": 4}
# With dropout to train and without it to evaluate, two shapes.
MATH = {"2x16x8, dropout 0.2": "math", "2x16x8, dropout 0": "math"}
FLASH = {"2x16x8, dropout 0": "flash"}


def observed(session):
    return {name: state["observed"] for name, state in observed_settings(session).items()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"attention_impl": "rows", "sdpa_backend_selected": {}, "nsa_backend": "none"}),
        (
            {"ATTENTION_BACKEND_MATH": True},
            {
                "attention_impl": "sdpa",
                "sdpa_backends_allowed": ["math"],
                "sdpa_backend_selected": MATH,
            },
        ),
        (
            {"DROPOUT": "0.0"},
            {
                "sdpa_backends_allowed": ["flash"],
                "sdpa_backend_selected": FLASH,
                "flash_attention_enabled": True,
            },
        ),
        ({"DROPOUT": "0.0", **SPARSE}, {"nsa_backend": "blocks"}),
        ({"DROPOUT": "0.0", **SPARSE, "NSA_BACKEND_GATHER": True}, {"nsa_backend": "gather"}),
    ],
)
def test_attention_is_recorded_by_form_and_shape(session, changes, expected):
    assert observed(session(**changes)).items() >= expected.items()


@pytest.mark.parametrize(("window", "masked"), [(512, True), (4096, False)])
def test_a_cpu_shows_its_kernel_on_a_piece_of_a_long_sequence(
    configure, monkeypatch, window, masked
):
    asked, real = [], F.scaled_dot_product_attention

    def attend(q, *given, **named):
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
        "observed": FLASH,
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
def test_a_compiled_model_is_observed(session):
    """The compiled model is not run, because compilation takes minutes."""
    compiled = session(COMPILE=True)
    found = observed(compiled)
    assert found["torch_compile_enabled"] and found["torch_compile_backend"] == "inductor"
    compiled.forward = compiled.model
    changed = {"torch_compile_enabled", "torch_compile_mode"}
    assert changed <= set(deviations(observed_settings(compiled)))
    plain = observed(compiled)
    assert plain["torch_compile_enabled"] is False and plain["torch_compile_backend"] is None


def test_a_strict_run_with_a_deviation_fails_before_its_first_step(configure, train, monkeypatch):
    """The precision is changed after the session is opened."""

    def behind(*arguments):
        opened = open_session(*arguments)
        torch.set_float32_matmul_precision("medium")
        return opened

    monkeypatch.setattr("gpt2.training.loop.open_session", behind)
    expected = "float32_matmul_precision: .*expected highest.*setting-mismatch"
    with pytest.raises(PreflightError, match=expected):
        train(configure())
    done = train(configure(**FAST, MATMUL_PRECISION_HIGHEST=True, MAX_ITERS=1), "fast")
    assert done.manifest()["deviations"] == ["float32_matmul_precision", "allow_tf32_matmul"]
