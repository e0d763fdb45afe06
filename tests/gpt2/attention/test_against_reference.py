"""Values and gradients of every composition, against the row-by-row reference."""

import pytest
import torch

from gpt2.attention.options import (
    AttentionSinkOptions,
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    ReciprocalOptions,
    SlidingOptions,
)
from gpt2.attention.rows import ScoreChunks

TIGHT, LOOSE = 1e-10, 2e-4
MODES = ("topk", "max", "entropy", "rms")
APPLY = ("output", "weights")
PATTERNS = {"full": FullOptions(), "sliding": SlidingOptions(window=11)}
PROJECTIONS = {
    "dense": DenseOptions(),
    "grouped": GroupedOptions(n_kv_head=2),
    "multi_query": GroupedOptions(n_kv_head=1),
    "latent": LatentOptions(latent_dim=6, shared_expansion=False),
    "latent_shared": LatentOptions(latent_dim=6, shared_expansion=True),
}
TERMS = {
    "none": (),
    "constant": (ReciprocalOptions(alpha=0.6, window=5, learnable=False),),
    "learnable": (ReciprocalOptions(alpha=0.6, window=13, learnable=True),),
}
SINK = (AttentionSinkOptions(),)
REQUESTS = {
    "topk": AttentionWeightsOptions("topk", topk=3, tau=0.0, detach=False),
    "rms": AttentionWeightsOptions("rms", topk=0, tau=0.8, detach=False),
    "none": AttentionWeightsOptions("none", topk=0, tau=0.0, detach=False),
    "detached": AttentionWeightsOptions("topk", topk=3, tau=0.0, detach=True),
}


# Each term and each pattern, with every gate.
@pytest.mark.parametrize(
    ("term", "pattern"), [("none", "sliding"), ("constant", "full"), ("learnable", "sliding")]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("apply", APPLY)
def test_gate_with_term_and_pattern(build, gate, thin_chunks, mode, apply, term, pattern):
    given = dict(pattern=PATTERNS[pattern], terms=TERMS[term], gates=(gate(mode, apply),))
    build(**given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("apply", APPLY)
def test_gate_beside_a_sink(build, gate, thin_chunks, mode, apply):
    given = dict(terms=TERMS["learnable"], gates=(gate(mode, apply),), request=REQUESTS["rms"])
    build(sinks=SINK, pattern=PATTERNS["sliding"], **given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["auto", "rows"])
def test_sink_in_plain_attention(build, thin_chunks, projection, pattern, backend):
    given = dict(projection=PROJECTIONS[projection], pattern=PATTERNS[pattern], backend=backend)
    case = build(sinks=SINK, **given)
    assert case.module.backend == {"auto": "sdpa"}.get(backend, backend)
    case.assert_equals_reference(TIGHT)


@pytest.mark.parametrize("choice", [{"head_average": True}, {"detach_stats": True}, {"topk": 1}])
@pytest.mark.parametrize("apply", APPLY)
def test_options_of_the_gate(build, gate, thin_chunks, apply, choice):
    build(gates=(gate("topk", apply, **choice),)).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("window", [0, 3, 1000])
def test_bands_narrower_than_a_chunk_and_wider_than_the_sequence(
    build, thin_chunks, window, learnable
):
    build(terms=(ReciprocalOptions(0.6, window, learnable),)).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("window", [1, 3, 8, 1000])
def test_windows_narrower_than_a_chunk_and_wider_than_the_sequence(
    build, gate, thin_chunks, window
):
    given = dict(terms=TERMS["constant"], gates=(gate(),), request=REQUESTS["rms"])
    build(pattern=SlidingOptions(window), **given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(
    ("apply", "pattern"), [("no gate", "full"), ("output", "sliding"), ("weights", "full")]
)
def test_requested_weights(build, gate, thin_chunks, request_name, apply, pattern):
    gates = () if apply == "no gate" else (gate("rms", apply),)
    given = dict(pattern=PATTERNS[pattern], gates=gates, request=REQUESTS[request_name])
    build(**given).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_projection_in_plain_attention(build, projection, pattern):
    given = dict(projection=PROJECTIONS[projection], pattern=PATTERNS[pattern])
    build(**given, handed_on=pattern == "full").assert_equals_reference(TIGHT)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("apply", APPLY)
def test_projection_with_everything(build, gate, thin_chunks, projection, apply):
    parts = dict(terms=TERMS["learnable"], gates=(gate("topk", apply),), request=REQUESTS["topk"])
    case = build(projection=PROJECTIONS[projection], handed_on=True, bias=False, **parts)
    case.assert_equals_reference(TIGHT)


@pytest.mark.parametrize(("length", "mode"), [(1, "entropy"), (7, "topk"), (65, "entropy")])
def test_lengths(build, gate, length, mode):
    chunks = ScoreChunks(cpu_elements=0)
    parts = dict(terms=TERMS["learnable"], gates=(gate(mode),), request=REQUESTS["rms"])
    build(length, chunks=chunks, **parts).assert_equals_reference(TIGHT)


@pytest.mark.parametrize("mode", MODES)
def test_single_precision(build, gate, mode):
    apply = "weights" if mode in ("topk", "rms") else "output"
    parts = dict(terms=TERMS["constant"], gates=(gate(mode, apply),), request=REQUESTS["none"])
    build(33, dtype=torch.float32, **parts).assert_equals_reference(LOOSE)
