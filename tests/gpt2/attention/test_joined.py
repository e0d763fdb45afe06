"""Joined passes, with the CPU implementation and with uncompiled FlexAttention."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from gpt2.attention import flex
from gpt2.attention.config import MIN_FLEX_HEAD_DIM
from gpt2.attention.flex import ScoreBranch
from gpt2.attention.options import (
    FullOptions,
    GroupedOptions,
    LatentOptions,
    SlidingOptions,
)
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.attention.state import BlockState

TIGHT = 1e-10
PATTERNS = {
    "full": FullOptions(),
    "sliding": SlidingOptions(window=11),
    "narrower than the band": SlidingOptions(window=4),
    "as wide as the band": SlidingOptions(window=6),
    "the token itself": SlidingOptions(window=1),
}
TERMS = {
    "none": (),
    "constant": (ReciprocalOptions(alpha=0.6, window=5, learnable=False),),
    "learnable": (ReciprocalOptions(alpha=0.6, window=5, learnable=True),),
}
GATES = {
    "no gate": None,
    "entropy-output": ("entropy", "output"),
    "entropy-weights": ("entropy", "weights"),
    "rms-output": ("rms", "output"),
    "rms-weights": ("rms", "weights"),
}


@pytest.fixture
def joined(build, gate):
    """Build an attention with the joined backend."""

    def make(chosen=None, length=33, **given):
        if chosen:
            given["gates"] = (gate(*chosen),)
        return build(length, backend="joined", **given)

    return make


@pytest.fixture
def by_flex(monkeypatch):
    """Passes by FlexAttention's own operator and its own backward, as written, not as compiled.

    torch refuses a gradient on a CPU because no kernel is made for it there; the operator's plain
    form has one.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    passes = []

    def all_pairs(*given):
        passes.append(given)
        return flex.flex_window_attention(torch_flex.flex_attention, *given)

    monkeypatch.setattr(flex, "_all_pairs", all_pairs)
    return passes


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("gated", GATES)
def test_every_composition_equals_the_reference(joined, pattern, term, gated):
    case = joined(GATES[gated], pattern=PATTERNS[pattern], terms=TERMS[term])
    case.assert_equals_reference(TIGHT)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("gated", GATES)
def test_flex_attention_equals_the_reference(joined, by_flex, term, gated):
    """Compare values and gradients, including the log-sum-exp; two blocks of 128 per side."""
    given = dict(pattern=SlidingOptions(135), terms=TERMS[term], n_head=2, n_embd=8, batch=1)
    joined(GATES[gated], 140, **given).assert_equals_reference(TIGHT)
    assert len(by_flex) >= (1 if term == "none" else 2)


@pytest.mark.parametrize("width", [1, 7, 128, 129, 300])
def test_a_pass_of_flex_is_its_twin(width):
    """Run without gradients, so that torch needs no patch."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 3, 260, 32), (2, 3, 260, 32), (2, 3, 260, 16)]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        found = flex.flex_window_attention(torch_flex.flex_attention, *given, width, 0.2)
    for one, other in zip(found, flex.window_attention(*given, width, 0.2), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("band", [0, 31, 32, 1000])
def test_bands_to_the_edges_of_the_sequence(joined, band):
    terms = (ReciprocalOptions(0.6, band, True),)
    joined(("rms", "weights"), terms=terms).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 65])
def test_lengths(joined, length):
    given = dict(terms=TERMS["learnable"])
    joined(("entropy", "output"), length, **given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize(
    "projection", [GroupedOptions(2), GroupedOptions(1), LatentOptions(6, False)]
)
def test_projections(joined, projection):
    given = dict(projection=projection, terms=TERMS["learnable"], handed_on=True)
    joined(("entropy", "weights"), **given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("choice", [{"head_average": True}, {"detach_stats": True}])
@pytest.mark.parametrize("apply", ["output", "weights"])
def test_options_of_the_gate(build, gate, apply, choice):
    for mode in ("entropy", "rms"):
        gates = (gate(mode, apply, **choice),)
        build(gates=gates, backend="joined").assert_equals_reference(TIGHT)


def test_a_later_token_changes_no_earlier_bit(joined):
    case = joined(("entropy", "weights"), terms=TERMS["learnable"])
    before, _ = case()
    x_BTC = case.x_BTC.detach().clone()
    x_BTC[:, 20] += 1.0
    after, _ = case.module(x_BTC, BlockState())
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


@pytest.mark.parametrize("mode", ["entropy", "rms"])
@pytest.mark.parametrize("apply", ["output", "weights"])
def test_autocast_multiplies_in_bf16_and_joins_in_fp32(joined, mode, apply):
    given = dict(terms=TERMS["learnable"], dtype=torch.float32, n_embd=64)
    case = joined((mode, apply), 65, **given)
    with torch.no_grad():
        for parameter in case.module.c_attn.parameters():
            parameter.mul_(0.2)
    out, _ = case()
    exact = case.gradients((out, None))
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = case()
    assert low.dtype == torch.bfloat16
    assert (low - out).abs().max() < 0.05 * out.abs().max()
    for found, expected in zip(case.gradients((low, None)), exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_log_sum_exp_is_wide():
    q, k, v = (torch.randn(1, 1, 9, MIN_FLEX_HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
    context, lse = ScoreBranch(q, k, 2, 9).attend(v, 1.0)
    assert context.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert lse[..., :2].isneginf().all() and context[..., :2, :].count_nonzero() == 0


def test_extreme_scores_stay_finite(joined):
    case = joined(("entropy", "weights"), terms=TERMS["learnable"], dtype=torch.float32)
    with torch.no_grad():
        case.module.c_attn.weight.mul_(100)
    out = case()
    assert out[0].isfinite().all()
    assert all(found.isfinite().all() for found in case.gradients(out))


def test_runs_on_shapes_alone(joined):
    with FakeTensorMode():
        case = joined(("rms", "weights"), terms=TERMS["learnable"], dtype=torch.float32)
        shapes = [found.shape for found in case.gradients(case())]
    assert shapes == [leaf.shape for leaf in case.leaves().values()]


@pytest.mark.slow
def test_compiles_its_kernels_inside_a_compiled_model(joined, by_flex, monkeypatch):
    """Check that the model does not compile the passes, and that equal blocks share kernels."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    kernel = torch.compile(
        torch_flex.flex_attention, backend=counted, fullgraph=True, dynamic=False
    )
    monkeypatch.setattr(
        flex, "_all_pairs", lambda *given: flex.flex_window_attention(kernel, *given)
    )
    torch._dynamo.reset()
    first = joined(("entropy", "output"), terms=TERMS["constant"])
    compiled = torch.compile(first.module, backend="eager")
    out_BTC, _ = compiled(first.x_BTC, first.state)
    assert torch.equal(out_BTC, first()[0])
    # Outside the band keys are as wide as values, so context and mean key have one kernel.
    made = len(graphs)
    assert made == 3
    joined(("entropy", "output"), terms=TERMS["constant"])()
    assert len(graphs) == made
