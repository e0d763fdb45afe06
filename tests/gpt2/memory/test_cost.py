"""Predicted time of a step: kernels counted, rates of a device, a stored calibration."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt2.config import Config
from gpt2.memory.cost import (
    CALIBRATION,
    DeviceRates,
    Kernel,
    StepKernels,
    assumed_rates,
    predict_step,
    rates,
)
from gpt2.memory.fake_kernels import fake_nsa_kernels
from gpt2.memory.fake_step import FakeTrainingStep, MinimalTraining
from gpt2.memory.predict import step_prediction
from gpt2.memory.tracker import StorageTracker
from gpt2.mlp.mlp import Mlp
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.fused import attend_fused
from gpt2.nsa.options import NsaOptions
from lib.config.field import SymbolValue
from lib.env.gpu import GPUS, find_gpu
from lib.errors import ConfigError
from lib.json_files import DamagedRecord
from tests.gpt2.builders import PARTS

Configure = Callable[..., Config]
RATES = DeviceRates({"half": 100.0, "fp32": 10.0}, 50.0, kernel_seconds=1.0, launch_seconds=2.0)


def counted(work: Callable[[], object]) -> Counter[Kernel]:
    """Return the kernels of ``work`` on fake tensors."""
    with StorageTracker() as tracker:
        work()
    return tracker.kernels[tracker.stage]


def test_a_kernel_takes_the_longest_of_arithmetic_traffic_and_launch() -> None:
    assert RATES.device_seconds({Kernel("half", 1000.0, 50.0): 2}) == 20.0
    assert RATES.device_seconds({Kernel("fp32", 10.0, 500.0): 1}) == 10.0
    assert RATES.device_seconds({Kernel("memory", 0.0, 1.0): 3}) == 3.0


def test_operations_count_their_bytes_and_views_count_nothing() -> None:
    a = torch.zeros(4, 8)
    with StorageTracker():
        table = torch.empty(1000, 8)
        index = torch.zeros(4, dtype=torch.long)
    assert counted(lambda: a @ a.t()) == {Kernel("fp32", 256.0, 2 * 128 + 64.0): 1}
    assert counted(lambda: a.to(torch.bfloat16)) == {Kernel("memory", 0.0, 128 + 64.0): 1}
    assert counted(lambda: a.add_(a)) == {Kernel("memory", 0.0, 3 * 128.0): 1}
    assert not counted(lambda: (a.view(8, 4), a.t(), torch.empty_like(a), a.detach()))
    # A lookup reads the rows that it returns, not the table.
    assert counted(lambda: table[index]) == {Kernel("memory", 0.0, 3 * 128.0): 1}


def test_depth_and_micro_batches_multiply_kernels(configure: Configure, monkeypatch) -> None:
    config = configure("ract", GLOBAL_BATCH=4, BATCH_SIZE=2, GRAD_ACCUMULATION=2)
    gpu = find_gpu("h100")
    short = FakeTrainingStep(config).needs(gpu, 2).kernels
    one = predict_step(short, config, assumed_rates("h100", "bf16", "high"), "h100", 1)
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    whole = FakeTrainingStep(config).needs(gpu, 2).kernels
    assert short.passes == whole.passes
    assert sum(short.update.values()) == sum(whole.update.values())
    assert short.casts == whole.casts
    both = 2 * sum(short.passes.values()) - sum(short.casts.values())
    assert one.launches == both + sum(short.update.values())


@pytest.mark.parametrize("slug", ["baseline", "ra", "mla", "golden-gate", "full"])
@pytest.mark.parametrize("changes", [{}, {"GRAD_CHECKPOINTING": True}])
def test_weights_are_cast_in_the_first_micro_batch_of_a_step(
    configure: Configure, monkeypatch, slug: str, changes: dict[str, SymbolValue]
) -> None:
    monkeypatch.setattr("gpt2.memory.fake_step._BLOCKS", 6)
    one = of_step(configure, slug, **changes)
    step = MinimalTraining.step
    twice = lambda self, tokens, pruner=None: step(self, 2 * tokens, pruner)  # noqa: E731
    monkeypatch.setattr(MinimalTraining, "step", twice)
    two = of_step(configure, slug, **changes)
    assert sum(one.casts.values()) >= 4 * 6
    assert two.casts == one.casts
    expected = one.passes + one.passes - one.casts
    # The sum of the losses, a number, is formed once.
    assert {k: n for k, n in (expected - two.passes).items() if k.bytes > 8} == {}
    assert two.passes - expected == {}


def test_sharded_weights_are_cast_in_every_micro_batch(configure: Configure) -> None:
    kernels = of_step(configure, GPUS=2, GRAD_ACCUMULATION=2, DATA_PARALLEL_FSDP=True)
    assert kernels.casts == {} and kernels.passes


def of_step(configure: Configure, slug: str = "baseline", **changes: SymbolValue) -> StepKernels:
    """Return the kernels of a step in bf16 on a GPU."""
    config = configure(slug, **({"PRECISION_BF16": True} | changes))
    return FakeTrainingStep(config).needs(find_gpu("h100"), config.train.batch_size).kernels


TRITON: dict[str, SymbolValue] = {
    "DROPOUT": "0.1",
    "DEVICE_CUDA": True,
    "ATTENTION_BACKEND_TRITON": True,
}
SLIDING: dict[str, SymbolValue] = {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 64}


@pytest.mark.parametrize(
    ("slug", "changes", "forward", "backward"),
    [
        ("mla", {}, 9, 16),
        ("golden-gate", {}, 10, 20),
        ("baseline", {"POSITIONS_ROPE": True}, 11, 13),
        # The seed of dropout is one more launch, and the update of a seed's state none.
        ("baseline", TRITON | SLIDING, 2, 2),
        ("ra", TRITON, 2, 2),
        ("baseline", TRITON | {"RECIPROCAL": True, "RECIPROCAL_LEARNABLE": True}, 2, 4),
        ("golden-gate-cross", TRITON, 30, 35),
        ("ract", TRITON, 10, 16),
        ("ract-weights", TRITON, 10, 16),
        ("full", TRITON, 45, 62),
    ],
)
def test_a_mechanism_launches_a_few_kernels_more_than_the_baseline(
    configure: Configure, slug: str, changes: dict[str, SymbolValue], forward: int, backward: int
) -> None:
    """In every layer, at any length: one form without a loop over chunks of rows."""
    dropout = changes.get("DROPOUT", "0.0")
    plain = of_step(configure, "baseline", DROPOUT=dropout)
    for length in (256, 1024):
        step = of_step(configure, slug, BLOCK_SIZE=length, **({"DROPOUT": "0.0"} | changes))
        assert sum(step.forward.values()) - sum(plain.forward.values()) <= forward
        assert sum(step.backward.values()) - sum(plain.backward.values()) <= backward
        assert (step.reads, step.update_reads) == (0, 0)


def test_auto_selects_the_form_with_the_fewest_launches_that_the_gpu_supports(
    configure: Configure,
) -> None:
    def launches(backend: str, gpu: str, slug: str) -> int:
        given: dict[str, SymbolValue] = {"DEVICE_CUDA": True, f"ATTENTION_BACKEND_{backend}": True}
        config = configure(slug, **given, BLOCK_SIZE=512)
        kernels = FakeTrainingStep(config).needs(find_gpu(gpu), 2).kernels
        return sum(kernels.forward.values()) + sum(kernels.backward.values())

    for slug in ("ra", "golden-gate-cross", "ract-weights"):
        auto, tiled, rows = (launches(name, "h100", slug) for name in ("AUTO", "TRITON", "ROWS"))
        assert auto == tiled < rows
        assert launches("AUTO", "t4", slug) == launches("ROWS", "t4", slug)
    with pytest.raises(ConfigError) as caught:
        launches("TRITON", "t4", "ra")
    assert caught.value.codes == ["attention.backend-unsupported"]
    # Torch's kernel reads and writes less than the Triton kernels.
    assert launches("AUTO", "h100", "baseline") <= launches("TRITON", "h100", "baseline")


def test_the_kernel_of_the_loss_saves_passes_over_the_logits(configure: Configure) -> None:
    def head(backend: str, gpu: str = "h100") -> tuple[int, float]:
        config = configure("baseline", BLOCK_SIZE=1024, **{f"LOSS_BACKEND_{backend}": True})
        kernels = FakeTrainingStep(config).needs(find_gpu(gpu), 8).kernels.passes
        return sum(kernels.values()), sum(kernel.bytes * n for kernel, n in kernels.items())

    auto, by_torch = head("AUTO"), head("TORCH")
    # 8192 tokens are divided into 7 chunks.
    assert by_torch[0] - auto[0] >= 7 * 10
    # A pass over all logits in bf16 moves at least 8192 · 50257 · 2 bytes.
    assert by_torch[1] - auto[1] >= 8 * 8192 * 50257 * 2
    assert head("AUTO", "t4") == head("TORCH", "t4")


@pytest.mark.parametrize(
    ("batch", "length", "count", "window"),
    [(4, 2048, 8, 256), (1, 16384, 16, 512), (1, 131072, 16, 512)],
)
def test_fused_sparse_attention_launches_few_kernels(
    batch: int, length: int, count: int, window: int
) -> None:
    """At any length. An H100 counted 50 backward, which needs several for a sort."""
    sizes = dict(compress=32, stride=16, select=64, count=count, window=window)
    options = NsaOptions(**PARTS["nsa"] | sizes)

    def leaf(heads: int, tokens: int) -> torch.Tensor:
        return torch.empty(batch, heads, tokens, 64, dtype=torch.bfloat16, requires_grad=True)

    launches = {}
    with StorageTracker() as tracker:
        q = leaf(12, length)
        pairs = [(leaf(2, n), leaf(2, n)) for n in (options.compressed(length), length, length)]
        tracker.enter("forward")
        out = attend_fused(q, BranchKeyValues(*pairs), options, 0, 0, fake_nsa_kernels(tracker))
        tracker.enter("backward")
        leaves = [q, *(x for pair in pairs for x in pair)]
        torch.autograd.grad(out, leaves, [torch.empty_like(x) for x in out])
    launches = {stage: sum(kernels.values()) for stage, kernels in tracker.kernels.items()}
    assert 0 < launches["forward"] <= 6 and 0 < launches["backward"] <= 50
    assert not tracker.reads


def test_a_read_by_the_host_is_counted(configure: Configure, monkeypatch) -> None:
    whole = Mlp.forward

    def reading(self: Mlp, x_BTC: torch.Tensor, *rest: object) -> torch.Tensor:
        assert not float(x_BTC.sum())
        return whole(self, x_BTC, *rest)

    monkeypatch.setattr(Mlp, "forward", reading)
    config = configure("baseline", GLOBAL_BATCH=4, BATCH_SIZE=2, GRAD_ACCUMULATION=2)
    prediction = step_prediction(config, find_gpu("h100"), assumed_rates("h100", "bf16", "high"))
    assert prediction.host_reads == 2 * config.model.shape.n_layer


def test_sizes_that_are_values_are_reads() -> None:
    with StorageTracker() as tracker:
        x = torch.zeros(4)
        assert len(x[x > 1]) == len(x.nonzero()) == 4
        x[torch.zeros(2, dtype=torch.long)]
    assert tracker.reads.total() == 2


def test_the_loss_scaler_of_fp16_reads_once_a_step(configure: Configure) -> None:
    step = of_step(configure, "baseline", PRECISION_BF16=False, PRECISION_FP16=True)
    assert (step.reads, step.update_reads) == (0, 1)


def test_a_faster_card_is_faster_and_launches_bound_small_steps(configure: Configure) -> None:
    config = configure("baseline", GLOBAL_BATCH=2, GRAD_ACCUMULATION=1)
    seconds = {}
    for name in ("l4", "a100-80", "h100", "b200"):
        prediction = step_prediction(config, find_gpu(name), assumed_rates(name, "bf16", "high"))
        seconds[name] = prediction.seconds
        assert prediction.tokens_per_second * prediction.seconds == 2 * 256
        assert prediction.mfu is not None and 0 < prediction.mfu < 1
    assert sorted(seconds, key=seconds.__getitem__, reverse=True) == list(seconds)
    slow_host = DeviceRates({"half": 1e15, "fp32": 1e15, "attention-half": 1e15}, 1e15)
    assert step_prediction(config, find_gpu("h100"), slow_host).bound == "launches"


def test_every_card_has_rates_of_its_precisions() -> None:
    for gpu in GPUS.values():
        for precision in gpu.tflops.keys() - {"tf32"}:
            assumed = assumed_rates(gpu.name, precision, "high")
            assert 0 < assumed.bytes_per_second < gpu.gbs * 1e9
            assert assumed.flops["half" if precision != "fp32" else "fp32"] > 0
    with pytest.raises(ConfigError) as caught:
        assumed_rates("t4", "bf16", "high")
    assert caught.value.codes == ["gpu.unknown-peak"]


def test_a_calibration_of_this_card_replaces_the_assumptions(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("baseline")
    assert rates(config, "h100", tmp_path).source.startswith("predicted, never compared")
    stored = {"flops": {"half": 1.0}, "bytes_per_second": 2.0, "factor": 1.5, "margin": 1.2}
    (tmp_path / CALIBRATION).write_text(json.dumps({"h100": {**stored, "source": "measured"}}))
    measured = rates(config, "H100 80GB", tmp_path)
    assert (measured.source, measured.factor, measured.margin) == ("measured", 1.5, 1.2)
    assert rates(config, "a100-80", tmp_path).factor == 1.0
    (tmp_path / CALIBRATION).write_text("{")
    with pytest.raises(DamagedRecord):
        rates(config, "h100", tmp_path)
