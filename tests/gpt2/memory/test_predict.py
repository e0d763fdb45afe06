"""Predictions against torch's memory tracker, full depth, and closed formulas."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from gpt2.attention.rows import ChunkedBackward
from gpt2.config import Config
from gpt2.memory.fake_step import FakeTrainingStep
from gpt2.memory.predict import estimate
from gpt2.mlp.mlp import Mlp
from gpt2.nsa import gather
from gpt2.training.minimal import MinimalTraining
from lib.config.field import SymbolValue
from lib.env.gpu import find_gpu, gpu_with_memory
from lib.errors import RunError

Configure = Callable[..., Config]
GPU = find_gpu("a10g")
MODES = {"ddp": "DATA_PARALLEL_DDP", "fsdp": "DATA_PARALLEL_FSDP"}
MIXED = ("baseline", "pruned-50", "golden-gate-cross", "ra-mla-golden-mech", "full", "ract-weights")


def totals(config: Config, batch: int, target: Any = GPU) -> dict[str, int]:
    """Return the peak bytes of each stage."""
    needs = FakeTrainingStep(config).needs(target, batch)
    return {stage: peak.total() for stage, peak in needs.peaks.items()}


def source_line(owner: type) -> str:
    """Return a pattern for file:line in the file of a class."""
    return owner.__module__.replace(".", "/") + r"\.py:\d+"


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("slug", "target", "again"),
    [(slug, GPU, False) for slug in MIXED]
    + [("baseline", None, False), ("full", None, False), ("full", GPU, True)],
)
def test_three_blocks_predict_any_depth(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    accumulation: int,
    slug: str,
    target: Any,
    again: bool,
) -> None:
    batch = {"GLOBAL_BATCH": 2 * accumulation, "GRAD_ACCUMULATION": accumulation}
    config = configure(slug, **batch, GRAD_CHECKPOINTING=again)
    short = FakeTrainingStep(config).needs(target, 2)
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    whole = FakeTrainingStep(config).needs(target, 2)
    assert whole.flops == short.flops
    assert {s: p.total() for s, p in short.peaks.items()} == pytest.approx(
        {s: p.total() for s, p in whole.peaks.items()}, rel=1e-3
    )


@pytest.mark.parametrize(
    ("mode", "accumulation", "again"),
    [("ddp", 1, False), ("fsdp", 1, False), ("fsdp", 4, False), ("fsdp", 1, True)],
)
def test_three_blocks_predict_any_depth_of_a_rank(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    accumulation: int,
    again: bool,
) -> None:
    batch = {"GLOBAL_BATCH": 8 * accumulation, "GRAD_ACCUMULATION": accumulation}
    settings = {**batch, "GPUS": 4, "GRAD_CHECKPOINTING": again, MODES[mode]: True}
    config = configure("pruned-50", **settings)
    short = totals(config, 2)
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    assert short == pytest.approx(totals(config, 2), rel=1e-3)


def test_ranks_divide_weights_gradients_and_moments(configure: Configure) -> None:
    """Closed formulas: between the passes of a step, a rank stores its rows only."""

    def of(**changes: SymbolValue) -> dict[str, Counter[str]]:
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
@pytest.mark.parametrize(("slug", "again"), [("baseline", False), ("full", False), ("full", True)])
def test_peak_matches_torchs_memory_tracker(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, slug: str, again: bool
) -> None:
    """MemTracker follows modules and saved tensors differently, and runs every chunk."""
    config = configure(
        slug,
        GLOBAL_BATCH=2,
        GRAD_ACCUMULATION=1,
        DEVICE_CPU=True,
        N_LAYER=2,
        GRAD_CHECKPOINTING=again,
    )
    monkeypatch.setattr("gpt2.training.step.require_finite", lambda *arguments: None)
    with FakeTensorMode():
        training = MinimalTraining(config)
        tokens_BT = torch.zeros((2, 257), dtype=torch.long)
        training.step([tokens_BT])
        tracker = MemTracker()
        tracker.track_external(training.state.model, training.state.optimizer, tokens_BT)
        with tracker:
            training.step([tokens_BT])
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert max(totals(config, 2, None).values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("slug", MIXED)
def test_parameters_are_exact(configure: Configure, slug: str) -> None:
    config = configure(slug)
    assert FakeTrainingStep(config).parameters == config.model.num_params()


def test_flops_of_gpt2(configure: Configure) -> None:
    """Three products for each matrix; flash attention has two forward and five backward."""
    config = configure(DROPOUT="0.0")
    shape = config.model.shape
    matrices = shape.n_layer * 12 * shape.n_embd**2 + shape.padded_vocab_size * shape.n_embd
    pairs = (shape.block_size + 1) / 2
    expected = 6 * matrices + shape.n_layer * 14 * shape.n_embd * pairs
    footprint = estimate(config, GPU)
    assert footprint.flops_per_token == pytest.approx(expected, rel=1e-12)
    assert estimate(config, "cpu").flops_per_token == pytest.approx(expected, rel=1e-12)
    recomputed = shape.n_layer * 2 * shape.n_embd * pairs
    assert config.model.flops_per_token() == pytest.approx(expected - recomputed, rel=1e-12)


def test_flops_of_a_window(configure: Configure) -> None:
    """No fused kernel skips what a mask hides: every pair is computed."""
    config = configure(DROPOUT="0.0", ATTENTION_PATTERN_SLIDING=True, SLIDING_WINDOW=64)
    shape = config.model.shape
    full = estimate(configure(DROPOUT="0.0"), GPU).flops_per_token
    hidden = shape.block_size - (shape.block_size + 1) / 2
    expected = full + shape.n_layer * 14 * shape.n_embd * hidden
    assert estimate(config, GPU).flops_per_token == pytest.approx(expected, rel=1e-12)


def test_memory_of_gpt2(configure: Configure) -> None:
    """Weights, gradients and two moments in fp32 are exact, and the step counters of AdamW."""
    footprint = estimate(configure(), GPU)
    assert footprint.peak_bytes["parameters"] == 4 * footprint.parameters
    assert footprint.peak_bytes["gradients"] == 4 * footprint.parameters
    assert 0 <= footprint.peak_bytes["optimizer"] - 8 * footprint.parameters < 1000


def test_a_gpu_saves_no_quadratic_tensor(configure: Configure) -> None:
    """With dropout a CPU only has plain products, which save T × T elements for each head."""
    short = estimate(configure(BLOCK_SIZE=128, BATCH_SIZE=4, GRAD_ACCUMULATION=2), GPU)
    long = estimate(configure(BLOCK_SIZE=256, BATCH_SIZE=2, GRAD_ACCUMULATION=4), GPU)
    assert long.peak_bytes["activations"] == pytest.approx(
        short.peak_bytes["activations"], rel=0.02
    )
    pairs = 6 * 4 * (2 * 256**2 - 4 * 128**2)
    # Five to fourteen bytes per pair: softmax, mask, and their product, in bf16 or fp32.
    assert 5 * pairs < long.cpu_peak_bytes - short.cpu_peak_bytes < 14 * pairs


def test_gpt2_124m_with_dropout(configure: Configure) -> None:
    """B 8, T 1024, bf16: plain products on a CPU save tensors that flash on a GPU does not."""
    config = configure(small=False)
    squares = 12 * 8 * 12 * 1024**2
    flash = estimate(config, GPU).total_bytes
    assert 5.0 < flash / 2**30 < 6.0
    assert 5 * squares < estimate(config, "cpu").total_bytes - flash < 14 * squares


def test_more_sequences_need_more(configure: Configure) -> None:
    needed = [max(totals(configure("ra"), batch).values()) for batch in (1, 2, 4)]
    assert needed == sorted(set(needed))


def test_the_largest_micro_batch_fits_and_the_next_does_not(configure: Configure) -> None:
    # By the kernel of the loss, a chunk of logits is not full at two sequences, and more fit.
    config = configure(GLOBAL_BATCH=64, BATCH_SIZE=2, GRAD_ACCUMULATION=32, LOSS_BACKEND_TORCH=True)
    gpu = gpu_with_memory(1.7)
    largest = estimate(config, gpu).largest_micro_batch
    assert 2 < largest < 64
    for batch, fits in ((largest, True), (2 * largest, False)):
        train = dataclasses.replace(config.train, batch_size=batch, grad_accumulation=64 // batch)
        assert estimate(dataclasses.replace(config, train=train), gpu).fits is fits


def test_nothing_fits_a_tiny_gpu(configure: Configure) -> None:
    footprint = estimate(configure(), gpu_with_memory(1.01))
    assert (footprint.fits, footprint.largest_micro_batch) == (False, 0)


def test_a_wrong_dimension_is_reported_with_its_source_line(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Mlp.__init__

    def narrow(self: Mlp, *arguments: Any) -> None:
        build(self, *arguments)
        self.c_proj = torch.nn.Linear(self.c_fc.out_features - 1, self.c_fc.in_features)

    monkeypatch.setattr(Mlp, "__init__", narrow)
    with pytest.raises(RunError) as caught:
        estimate(configure(), GPU)
    (problem,) = caught.value.problems
    assert problem.code == "model.shape-mismatch"
    assert re.fullmatch(source_line(Mlp), problem.where)
    assert "h.0.mlp.c_proj" in problem.what and "511" in problem.what


def test_a_wrong_dimension_in_backward_is_reported(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(soft: Any, dlast: torch.Tensor, dstatistics: Any) -> torch.Tensor:
        return dlast[..., :-1]

    monkeypatch.setattr(ChunkedBackward, "_softmaxes", staticmethod(wrong))
    with pytest.raises(RunError) as caught:
        estimate(configure("ract"), GPU)
    (problem,) = caught.value.problems
    assert problem.code == "model.shape-mismatch"
    assert re.fullmatch(source_line(ChunkedBackward), problem.where)
    assert "backward, last block" in problem.what


@pytest.fixture(scope="module")
def selecting(configure: Configure) -> Configure:
    """Return a builder of configurations with native sparse attention."""

    def build(**settings: Any) -> Config:
        sizes = {"NSA_COMPRESS_BLOCK": 8, "NSA_COMPRESS_STRIDE": 4, "NSA_SELECT_BLOCK": 16}
        named = {"DROPOUT": "0.0", "ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2}
        return configure(ATTENTION_PATTERN_NSA=True, **named, **sizes, **settings)

    return build


# The gather backend repeats its two products in the backward pass.
@pytest.mark.parametrize(("backend", "products"), [("BLOCKS", 7), ("GATHER", 9)])
def test_flops_of_a_selection(selecting: Configure, backend: str, products: int) -> None:
    """Only visible pairs of selected blocks count."""
    target = "cpu" if backend == "BLOCKS" else GPU

    def predicted(count: int) -> float:
        config = selecting(NSA_SELECT_COUNT=count, **{f"NSA_BACKEND_{backend}": True})
        return estimate(config, target).flops_per_token

    shape = selecting().model.shape
    # A fourth block of 16 tokens for all but the first three of them.
    pairs = 16 * (shape.block_size - 3 * 16) / shape.block_size
    expected = shape.n_layer * 2 * products * shape.n_embd * pairs
    assert predicted(4) - predicted(3) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("target", [GPU, "cpu"])
def test_a_wrong_dimension_of_gathered_keys_is_reported(
    selecting: Configure, monkeypatch: pytest.MonkeyPatch, target: Any
) -> None:
    right = gather.TokenRanges.tokens
    monkeypatch.setattr(
        gather.TokenRanges, "tokens", lambda ranges, total: right(ranges, total)[:, None]
    )
    with pytest.raises(RunError) as caught:
        estimate(selecting(NSA_BACKEND_GATHER=True), target)
    (problem,) = caught.value.problems
    assert problem.code == "model.shape-mismatch"
    assert re.fullmatch(r"gpt2/nsa/gather\.py:\d+", problem.where)
