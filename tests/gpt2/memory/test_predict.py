"""Predictions against torch's memory tracker, full depth, and closed formulas."""

import re
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from gpt2.attention.rows import ChunkedBackward
from gpt2.config import Config
from gpt2.memory.fake_step import FakeTrainingStep
from gpt2.memory.predict import estimate
from gpt2.mlp.mlp import Mlp
from gpt2.model import GPT
from gpt2.training.loop import step_on_tokens
from gpt2.training.state import build_state
from lib.env.gpu import find_gpu, gpu_with_memory
from lib.errors import RunError

Configure = Callable[..., Config]
GPU = find_gpu("a10g")
MODES = {"ddp": "DATA_PARALLEL_DDP", "fsdp": "DATA_PARALLEL_FSDP"}
MIXED = ("pruned-50", "full", "ract-weights")


GATHER = {
    "ATTENTION_PATTERN_NSA": True,
    "NSA_BACKEND_GATHER": True,
    "ATTENTION_PROJECTION_GROUPED": True,
    "N_KV_HEAD": 2,
    "DROPOUT": "0.0",
}
ONE = {"GLOBAL_BATCH": 2, "GRAD_ACCUMULATION": 1}
FOUR = {"GLOBAL_BATCH": 8, "GRAD_ACCUMULATION": 4}
AGAIN = {"GRAD_CHECKPOINTING": True}
RANKS = {"GLOBAL_BATCH": 8, "GRAD_ACCUMULATION": 1, "GPUS": 4}
FSDP = {**RANKS, MODES["fsdp"]: True}


@pytest.mark.parametrize(
    ("slug", "target", "settings"),
    [
        *((slug, GPU, FOUR) for slug in MIXED),
        *((slug, None, ONE) for slug in ("baseline", "full")),
        ("full", GPU, {**AGAIN, **ONE}),
        ("pruned-50", GPU, {**RANKS, MODES["ddp"]: True}),
        ("pruned-50", GPU, FSDP),
        ("pruned-50", GPU, {**FSDP, **AGAIN}),
        ("pruned-50", GPU, {**FSDP, "GLOBAL_BATCH": 32, "GRAD_ACCUMULATION": 4}),
    ],
)
def test_three_blocks_predict_any_depth(configure, monkeypatch, slug, target, settings):
    config = configure(slug, **settings)
    training = FakeTrainingStep(config)
    assert training.parameters == config.model.num_params()
    short = training.needs(target, 2)
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    whole = FakeTrainingStep(config).needs(target, 2)
    assert whole.flops == short.flops
    assert {s: p.total() for s, p in short.peaks.items()} == pytest.approx(
        {s: p.total() for s, p in whole.peaks.items()}, rel=1e-3
    )


def test_ranks_divide_weights_gradients_and_moments(configure):
    """Closed formulas: between the passes of a step, a rank stores its rows only."""

    def of(**changes):
        config = configure("baseline", GLOBAL_BATCH=8, GRAD_ACCUMULATION=1, **changes)
        return FakeTrainingStep(config).needs(GPU, 2).peaks

    ddp, fsdp = (of(GPUS=4, **{symbol: True}) for symbol in MODES.values())
    for category in ("parameters", "gradients", "optimizer"):
        divided = ddp["update"][category] / 4
        assert fsdp["update"][category] == pytest.approx(divided, rel=0.01), category
    # An evaluation has all weights beside the rows.
    weights = ddp["update"]["parameters"]
    assert fsdp["evaluation"]["parameters"] == pytest.approx(1.25 * weights, rel=0.01)
    # A bucket of DDP has a copy of each gradient.
    alone = of(GPUS=1, BATCH_SIZE=8)
    assert ddp["update"].total() - alone["update"].total() == pytest.approx(weights, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "again"), [("baseline", False), ("full", True)])
def test_peak_matches_torchs_memory_tracker(configure, monkeypatch, slug, again):
    """MemTracker follows modules and saved tensors differently, and runs every chunk."""
    config = configure(
        slug,
        GLOBAL_BATCH=2,
        GRAD_ACCUMULATION=1,
        DEVICE_CPU=True,
        N_LAYER=2,
        GRAD_CHECKPOINTING=again,
    )
    monkeypatch.setattr("gpt2.training.loop.require_finite", lambda *arguments: None)
    with FakeTensorMode():
        training = build_state(config, GPT(config.model))
        tokens_BT = torch.zeros((2, 257), dtype=torch.long)
        step_on_tokens(training, [tokens_BT])
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer, tokens_BT)
        with tracker:
            step_on_tokens(training, [tokens_BT])
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    peak, _ = FakeTrainingStep(config).needs(None, 2).highest()
    assert peak.total() == pytest.approx(expected, rel=0.01)


def flops_per_token(config, target):
    step = FakeTrainingStep(config).needs(target, 2)
    return step.flops / (2 * config.model.shape.block_size)


def test_flops_of_gpt2(configure):
    """Three products for each matrix; flash attention has two forward and five backward."""
    config = configure(DROPOUT="0.0")
    shape = config.model.shape
    matrices = shape.n_layer * 12 * shape.n_embd**2 + shape.padded_vocab_size * shape.n_embd
    pairs = (shape.block_size + 1) / 2
    expected = 6 * matrices + shape.n_layer * 14 * shape.n_embd * pairs
    assert estimate(config, GPU).flops_per_token == pytest.approx(expected, rel=1e-12)
    assert flops_per_token(config, None) == pytest.approx(expected, rel=1e-12)
    recomputed = shape.n_layer * 2 * shape.n_embd * pairs
    assert config.model.flops_per_token() == pytest.approx(expected - recomputed, rel=1e-12)
    # No fused kernel skips what a window hides: every pair is computed.
    window = configure(DROPOUT="0.0", ATTENTION_PATTERN_SLIDING=True, SLIDING_WINDOW=64)
    hidden = shape.n_layer * 14 * shape.n_embd * (shape.block_size - pairs)
    assert flops_per_token(window, GPU) == pytest.approx(expected + hidden, rel=1e-12)


def test_flops_of_adapters(configure):
    """Backward has both products for adapters, scores and values, and one for frozen matrices."""
    config = configure(DROPOUT="0.0", LORA=True, INIT_FROM="run:base")
    shape, rank = config.model.shape, 8
    recomputed = shape.n_layer * shape.n_embd * (shape.block_size + 1)
    # Nothing before the first block is trained, so its input needs no gradient.
    first = 2 * shape.n_embd * (3 * shape.n_embd + rank)
    found = flops_per_token(config, None)
    assert config.model.flops_per_token() == pytest.approx(found - recomputed + first, rel=1e-12)


NSA = {name: value for name, value in GATHER.items() if name != "NSA_BACKEND_GATHER"}


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        ("ATTENTION_BACKEND_EFFICIENT", {"DROPOUT": "0.0"}),
        ("ATTENTION_BACKEND_TRITON", {"DROPOUT": "0.0"}),
        ("NSA_BACKEND_TRITON", NSA),
    ],
)
def test_a_kernel_that_a_cpu_lacks_is_predicted_for_a_gpu(configure, kernel, settings):
    named = estimate(configure(**settings, **{kernel: True}), GPU)
    assert named.cpu_peak_bytes == estimate(configure(**settings), GPU).cpu_peak_bytes


def test_memory_of_gpt2(configure):
    """Weights, gradients and two moments in fp32 are exact, and the step counters of AdamW."""
    footprint = estimate(configure(), GPU)
    assert footprint.peak_bytes["parameters"] == 4 * footprint.parameters
    assert footprint.peak_bytes["gradients"] == 4 * footprint.parameters
    assert 0 <= footprint.peak_bytes["optimizer"] - 8 * footprint.parameters < 1000


def test_rmsnorm_stores_what_layernorm_does_on_a_gpu_and_more_on_a_cpu(configure):
    """One activation of each norm more: a CPU has no fused kernel."""

    def peaks(target):
        names = ("NORM_LAYERNORM", "NORM_RMSNORM")
        steps = [FakeTrainingStep(configure(BIAS=False, **{name: True})) for name in names]
        return [step.needs(target, 2).peaks["backward, last block"].total() for step in steps]

    shape = configure().model.shape
    activation = 4 * 2 * shape.block_size * shape.n_embd
    layernorm, rmsnorm = peaks(GPU)
    assert rmsnorm == layernorm
    layernorm, rmsnorm = peaks(None)
    # Without that of the last norm, which is released by then.
    assert rmsnorm - layernorm == pytest.approx(2 * shape.n_layer * activation, rel=0.1)


def test_memory_of_muon(configure):
    """One number for each weight of a block's matrices, two for all others."""
    config = configure(OPTIMIZER_MUON=True)
    footprint, shape = estimate(config, GPU), config.model.shape
    hidden = shape.n_layer * 12 * shape.n_embd**2
    expected = 8 * footprint.parameters - 4 * hidden
    assert 0 <= footprint.peak_bytes["optimizer"] - expected < 1000
    # Its products are not those of a token.
    assert footprint.flops_per_token == estimate(configure(), GPU).flops_per_token


@pytest.mark.slow
def test_the_memory_of_a_gpu_limits_the_micro_batch(configure):
    training, target = FakeTrainingStep(configure()), gpu_with_memory(99.0)

    def gib(batch):
        """Return the memory that is just enough, with context and fragmentation."""
        return training.needs(target, batch).highest()[0].total() * 1.05 / 2**30 + 1.0

    above, below = 1 + 1e-6, 1 - 1e-6
    sizes = (1.01, gib(1) * above, gib(4) * below, gib(4) * above, 99.0)
    needs = [estimate(configure(), gpu_with_memory(size)) for size in sizes]
    expected = [(False, 0), (False, 1), (True, 2), (True, 4), (True, 8)]
    assert [(each.fits, each.largest_micro_batch) for each in needs] == expected


# The gather backend repeats its two products in the backward pass.
@pytest.mark.parametrize(("backend", "products"), [("BLOCKS", 7), ("GATHER", 9)])
def test_flops_of_a_selection(configure, backend, products):
    """Only visible pairs of selected blocks count."""
    target = None if backend == "BLOCKS" else GPU
    sizes = {"NSA_COMPRESS_BLOCK": 8, "NSA_COMPRESS_STRIDE": 4, "NSA_SELECT_BLOCK": 16}
    settings = {**GATHER, **sizes, "NSA_BACKEND_GATHER": backend == "GATHER"}

    def predicted(count):
        named = {**settings, f"NSA_BACKEND_{backend}": True, "NSA_SELECT_COUNT": count}
        return flops_per_token(configure(**named), target)

    shape = configure().model.shape
    # A fourth block of 16 tokens for all but the first three of them.
    pairs = 16 * (shape.block_size - 3 * 16) / shape.block_size
    expected = shape.n_layer * 2 * products * shape.n_embd * pairs
    assert predicted(4) - predicted(3) == pytest.approx(expected, rel=1e-9)


def test_a_wrong_dimension_is_reported_with_its_source_line(configure, monkeypatch):
    def wrong(soft, dlast, dstatistics):
        """Return the gradient of the softmax without its last column."""
        return dlast[..., :-1]

    monkeypatch.setattr(ChunkedBackward, "_softmaxes", staticmethod(wrong))
    with pytest.raises(RunError) as caught:
        estimate(configure("ract"), GPU)
    (problem,) = caught.value.problems
    assert problem.code == "model.shape-mismatch" and "backward, last block" in problem.what
    assert re.fullmatch(r"gpt2/attention/rows\.py:\d+", problem.where)

    build = Mlp.__init__

    def narrow(mlp, *arguments):
        build(mlp, *arguments)
        mlp.c_proj = torch.nn.Linear(mlp.c_fc.out_features - 1, mlp.c_fc.in_features)

    monkeypatch.setattr(Mlp, "__init__", narrow)
    with pytest.raises(RunError, match=r"gpt2/mlp/mlp\.py:\d+: .*h\.0\.mlp\.c_proj"):
        estimate(configure("baseline"), GPU)
