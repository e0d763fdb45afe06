"""A training step at full size without memory: its peak bytes and FLOPs at the configured depth.

The trainer's own step runs on a model of at most three blocks whose tensors have shapes only (see
``tracker.py``), with the chunk sizes and kernels of the target.

B batch or micro-batch, T tokens, N heads, D width of queries and keys, E width of values.
"""

import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gpt2.attention.backends import Place
from gpt2.attention.components import RowChunk
from gpt2.attention.rows import GPU_CHUNK_ELEMENTS, ScoreChunks
from gpt2.config import Config
from gpt2.lora import store_base
from gpt2.loss import LogitsChunks
from gpt2.memory.fake_kernels import fake_nsa_kernels, fake_tile_launch
from gpt2.memory.sharding import ShardedParameters
from gpt2.memory.tracker import BytesByCategory, StorageTracker
from gpt2.model import GPT, Execution, count_parameters
from gpt2.nsa.module import Nsa
from gpt2.training.loop import step_on_tokens
from gpt2.training.state import build_state
from lib.env.gpu import Gpu
from lib.errors import ConfigError, Problem, RunError
from lib.optim.optimizers import trainable_parameters
from lib.project import ROOT
from lib.pruning.pruners import Pruner

# With more chunks, all but the last ones are simulated as one large chunk.
_MAX_CHUNKS = 6
# Chunks and blocks to run: the memory of one is still in use while the next is computed.
_CHUNKS_RUN = 2


def target_execution(target: Gpu | None, tracker: StorageTracker, loss_backend: str) -> Execution:
    """Return chunk sizes and kernels of ``target``, or of the CPU if it is None.

    Raises ConfigError if the target has no kernel of the loss, and it is named.
    """
    if target is None:
        return Execution(FewScoreChunks(tracker=tracker), FewLogitsBlocks(form="first"))
    chunks = FewScoreChunks(cpu_elements=GPU_CHUNK_ELEMENTS, tracker=tracker)
    # Flash attention has the same requirement as the Triton kernels.
    if target.flash:
        logits = FewLogitsBlocks(form="whole" if loss_backend == "torch" else "kernel")
        return Execution(chunks, logits, fake_tile_launch(tracker))
    if loss_backend == "triton":
        what, fix = f"LOSS_BACKEND: triton does not support {target.name}", "LOSS_BACKEND_TORCH=y"
        raise ConfigError(Problem(what, next=f"type: SET={fix}", code="gpu.unsupported"))
    return Execution(chunks, FewLogitsBlocks(form="whole"))


@dataclasses.dataclass(frozen=True)
class FewLogitsBlocks(LogitsChunks):
    """Chunks of logits whose rows form one whole block (torch on a GPU), or none (a kernel in place).

    On a CPU, the first blocks: they are alike and release their memory, so a few determine the peak.
    """

    form: Literal["kernel", "whole", "first"] = dataclasses.field(kw_only=True)

    def blocks(self, logits_XV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if self.form == "whole":
            return iter([(logits_XV, *others)])
        count = _CHUNKS_RUN if self.form == "first" else 0
        return islice(super().blocks(logits_XV, *others), count)


@dataclasses.dataclass(frozen=True)
class FewScoreChunks(ScoreChunks):
    """Chunks of the row engine, with all but the last merged if there are many.

    The last chunks are the widest. FLOPs of the merged chunk count by the share of its pairs that
    the original chunks compute.
    """

    tracker: StorageTracker = dataclasses.field(kw_only=True)

    def chunks(self, q_BNTH: Tensor, first_column: Callable[[int], int]) -> Iterator[RowChunk]:
        all_chunks = list(super().chunks(q_BNTH, first_column))
        if len(all_chunks) <= _MAX_CHUNKS:
            yield from all_chunks
            return
        merged = all_chunks[:-_CHUNKS_RUN]
        whole = RowChunk(0, merged[-1].last, 0)
        pairs = sum(chunk.height * (chunk.last - chunk.left) for chunk in merged)
        with self.tracker.standing_for(pairs / whole.last**2):
            yield whole
        yield from all_chunks[-_CHUNKS_RUN:]


class GpuFunctions(TorchFunctionMode):
    """Calls of torch's attention, dropout and RMSNorm, replaced by the kernels that a GPU would run.

    torch without CUDA cannot run backward on a fake CUDA tensor, so the step is fake on the CPU. The
    fake implementation of the GPU's kernel saves the same tensors for backward as on the GPU.
    ``backend`` is the configured backend of plain attention.
    """

    def __init__(self, target: Gpu, backend: str) -> None:
        super().__init__()
        self.target, self.backend = target, backend
        self._replaced = {
            F.scaled_dot_product_attention: self._attention,
            F.dropout: self._dropout,
            F.rms_norm: self._rms_norm,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))

    def hooks(self, blocks: nn.ModuleList, tracker: StorageTracker) -> list[RemovableHandle]:
        """Enter the mode in blocks that backward recomputes: autograd does not propagate it."""

        def enter(*_: Any) -> None:
            if tracker.stage.startswith("backward"):
                self.__enter__()

        def leave(*_: Any) -> None:
            if tracker.stage.startswith("backward"):
                self.__exit__(None, None, None)

        # Recomputation ends with an exception as soon as all tensors exist.
        handles = [block.register_forward_hook(leave, always_call=True) for block in blocks]
        return handles + [block.register_forward_pre_hook(enter) for block in blocks]

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Run flash, else memory-efficient attention, else plain products.

        Flash requires half precision and no mask; memory-efficient attention does not support GQA.
        """
        half = q.dtype in (torch.bfloat16, torch.float16)
        flash = self.target.flash and half and attn_mask is None
        if self.backend in ("auto", "flash") and flash:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal
            )[0]
        if self.backend == "math" or enable_gqa:
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
                )
        bias = None
        if attn_mask is not None:
            shape = (q.shape[0], q.shape[1], *attn_mask.shape[-2:])
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(shape)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, dropout_p, is_causal
        )[0]

    @staticmethod
    def _rms_norm(
        x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """Save what the fused kernel saves: input, scale and a number per row, as LayerNorm does."""
        return F.layer_norm(x, shape, weight)

    @staticmethod
    def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Save a byte per element for backward; a CPU saves factors of the input's type."""
        return torch.native_dropout(x, p, True)[0] if training and p > 0.0 else x


# The first block, one that represents all inner blocks, and the last.
_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class StepNeeds:
    """Peak bytes of each stage of a step, by category, and its FLOPs."""

    peaks: dict[str, BytesByCategory]
    flops: float

    def highest(self) -> tuple[BytesByCategory, str]:
        """Return the bytes of the stage with the highest peak, and the stage's name."""
        stage = max(self.peaks, key=lambda stage: self.peaks[stage].total())
        return self.peaks[stage], stage


class FakeTrainingStep:
    """Model, optimizer and pruner of a configuration as fake tensors, after a first update.

    At most three blocks are built; ``needs`` extrapolates to the configured depth.
    """

    def __init__(self, config: Config) -> None:
        shape = config.model.shape
        # Inner blocks of the real model that are not built.
        self.omitted = max(0, shape.n_layer - _BLOCKS)
        shape = dataclasses.replace(shape, n_layer=min(shape.n_layer, _BLOCKS))
        self.config = dataclasses.replace(
            config,
            # The chunks of logits stand for the kernel of the loss.
            model=dataclasses.replace(config.model, shape=shape, loss_backend="torch"),
            machine=dataclasses.replace(config.machine, device="cpu", compile=False),
            # Tensors without memory have no values to check.
            numerics=dataclasses.replace(config.numerics, check=False, detect_anomaly=False),
        )
        self._loss_backend = config.model.loss_backend
        # Sequences of GLOBAL_BATCH of a process.
        self.share = config.train.global_batch // config.train.gpus
        self.location = "building the model"
        with self._named_errors(), StorageTracker():
            self.model = GPT(self.config.model)
            store_base(self.model, self.config.model.adapters)
            self.state = build_state(self.config, self.model)
            is_sharded = config.machine.data_parallel == "fsdp"
            ranks = config.train.gpus if is_sharded else 1
            self.sharded = ShardedParameters(self.model, self.model.h, ranks)
            for name, part in self.model.named_modules():
                part.register_forward_pre_hook(partial(self._forward_of, name))
            # The first update creates the optimizer's state.
            self._set_gradients()
            self.state.optimizer.step(gradient_norm=torch.zeros(()))
            self.state.optimizer.zero_grad()

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the configured model."""
        others = count_parameters(self.model.h[1]) if self.omitted else 0
        return self.model.num_params() + self.omitted * others

    def needs(self, target: Gpu | None, batch: int) -> StepNeeds:
        """Return the needs of a step of micro-batches of ``batch`` sequences on ``target``.

        Raises RunError with source line and operation if dimensions do not fit.
        """
        tracker, accumulates = StorageTracker(), batch < self.share
        self._use_kernels(target, tracker)
        backend = self.config.model.attention.backend
        functions = GpuFunctions(target, backend) if target else nullcontext()
        with self._named_errors(), functions, tracker:
            static = self._track_static(tracker, accumulates)
            self.sharded.begin(tracker)
            hooks = self._hooks(tracker, accumulates)
            if isinstance(functions, GpuFunctions):
                hooks += functions.hooks(self.model.h, tracker)
            pruner = self.state.pruner
            self.state.pruner = cast(Pruner, _UpdateStage(pruner, tracker, self.sharded))
            try:
                tokens = self.config.model.shape.block_size + 1
                tokens_BT = torch.empty((batch, tokens), dtype=torch.long)
                step_on_tokens(self.state, [tokens_BT])
            finally:
                self.state.pruner = pruner
                for hook in hooks:
                    hook.remove()
        # An optimizer may have products too, once for all micro-batches.
        flops = sum(n for stage, n in tracker.flops.items() if stage != "update")
        peaks = tracker.peaks
        if self.omitted:
            extra = _growth(tracker, static)
            peaks = {stage: _minus(p, extra[stage], -self.omitted) for stage, p in peaks.items()}
            inner = tracker.flops["forward, inner block"] + tracker.flops["backward, inner block"]
            flops += self.omitted * inner
        if self.sharded.ranks > 1:
            peaks["evaluation"] = self._evaluation(tracker, static)
        return StepNeeds(peaks, flops)

    def _use_kernels(self, target: Gpu | None, tracker: StorageTracker) -> None:
        """Use chunk sizes and kernels of ``target``; raise ConfigError if it has none."""
        if target:
            # A GPU may not support components that a CPU does.
            place: Place = "gpu" if target.flash else "gpu without kernels"
            self.config.model.backends(place)
        self.model.set_execution(target_execution(target, tracker, self._loss_backend))
        packs = bool(target and target.flash)
        for pattern in [block.attn.pattern for block in self.model.blocks]:
            if isinstance(pattern, Nsa):
                fuses = target and pattern.options.fuses
                pattern.fused = fake_nsa_kernels(tracker) if fuses else None
                pattern.packs = lambda q: packs and q.dtype == torch.bfloat16

    def _set_gradients(self) -> None:
        for parameter in trainable_parameters(self.model).values():
            parameter.grad = torch.empty_like(parameter)

    def _track_static(self, tracker: StorageTracker, accumulates: bool) -> BytesByCategory:
        """Track tensors that persist between steps. Return their bytes for an inner block."""
        assert isinstance(self.state.optimizer, torch.optim.Optimizer)
        state = self.state.optimizer.state
        masks = self.state.pruner.state_dict().get("masks", {})
        names = {p: name for name, p in self.model.named_parameters()}
        inner = set(self.model.h[1].parameters()) if self.omitted else set()
        if accumulates and self.sharded.ranks == 1:
            # Gradients exist from the second micro-batch on.
            self._set_gradients()
        static: BytesByCategory = Counter()
        for p, name in names.items():
            moments = [s for s in state[p].values() if isinstance(s, Tensor)]
            optimizer = [*moments, *([masks[name]] if name in masks else [])]
            gradients = [] if p.grad is None else [p.grad]
            sizes: BytesByCategory = Counter()
            for category, tensors in (
                ("parameters", [p]),
                ("optimizer", optimizer),
                ("gradients", gradients),
            ):
                for tensor in tensors:
                    size = self.sharded.shard_bytes(tensor)
                    tracker.is_now(tensor, category, size)
                    sizes[category] += size
            held = []
            if accumulates and not gradients and p.requires_grad:
                # Whole gradients of sharded parameters exist in the backward pass of a block only.
                held.append("gradients")
            if self.config.train.gpus > 1 and self.sharded.ranks == 1 and p.requires_grad:
                # A copy of the gradient in a bucket of DistributedDataParallel.
                held.append("temporaries")
            for category in held:
                tracker.hold(category, self.sharded.shard_bytes(p))
                sizes[category] += self.sharded.shard_bytes(p)
            if p in inner:
                static += sizes
        return static

    def _hooks(self, tracker: StorageTracker, accumulates: bool) -> list[RemovableHandle]:
        """Register hooks that enter a stage before each block, the head and the update."""
        hooks, last = [], len(self.model.h) - 1
        for index, block in enumerate(self.model.h):
            name = "last block" if index == last else "inner block" if index else "first block"
            hooks.append(block.register_forward_pre_hook(_entering(tracker, f"forward, {name}")))
            hooks.append(block.register_forward_hook(self._watch_backward(tracker, name)))
        hooks.append(self.model.ln_f.register_forward_pre_hook(_entering(tracker, "head")))
        for p in trainable_parameters(self.model).values():
            hook = p.register_post_accumulate_grad_hook(
                lambda p: self.sharded.reduced(tracker, p, accumulates)
            )
            hooks.append(hook)
        return hooks

    def _watch_backward(self, tracker: StorageTracker, name: str) -> Any:
        """Return a forward hook; the backward pass of a block begins with its output's gradient."""

        def enter(gradient: Tensor) -> None:
            self.location = f"backward, {name}"
            tracker.enter(self.location)
            tracker.making = "temporaries"

        def watch(block: nn.Module, inputs: Any, outputs: Any) -> None:
            outputs[0].register_hook(enter)

        return watch

    def _forward_of(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.location = f"forward of {name or 'the model'}"

    def _evaluation(self, tracker: StorageTracker, static: BytesByCategory) -> BytesByCategory:
        """Return the peak of an evaluation of sharded weights, which are gathered in a copy.

        Activations are at most those of the first block of a training step, or of the head.
        """
        begin, head = tracker.starts["forward, first block"], tracker.starts["head"]
        first = tracker.peaks["forward, first block"]["activations"]
        last = _minus(tracker.peaks["head"], head)
        shards = self.sharded.stored_bytes() + self.omitted * static["parameters"]
        return Counter(
            activations=max(first, last["activations"] + last["temporaries"]),
            optimizer=begin["optimizer"] + self.omitted * static["optimizer"],
            parameters=shards + 4 * self.parameters,
        )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert torch's shape errors into a Problem with the innermost line of the product."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            what, line = f"{self.location}: {str(error).splitlines()[0]}", ""
            for frame in traceback.extract_tb(error.__traceback__):
                path = Path(frame.filename)
                if path.is_relative_to(ROOT / "gpt2") and "memory" not in path.parts:
                    line = f"{path.relative_to(ROOT)}:{frame.lineno}"
            raise RunError(Problem(what, line, code="model.shape-mismatch")) from error


class _UpdateStage:
    """Wrapper of the pruner, whose first call after backward starts the update stage."""

    def __init__(self, pruner: Pruner, tracker: StorageTracker, sharded: ShardedParameters) -> None:
        self.pruner, self.tracker, self.sharded = pruner, tracker, sharded

    def mask_gradients(self) -> None:
        self.sharded.end(self.tracker)
        self.tracker.enter("update")
        self.pruner.mask_gradients()

    def observe(self, gradient_norm: Tensor) -> None:
        self.pruner.observe(gradient_norm)


def _entering(tracker: StorageTracker, stage: str) -> Any:
    """Return a forward pre-hook that enters ``stage``, unless a backward pass recomputes a block."""

    def enter(module: nn.Module, inputs: Any) -> None:
        if not tracker.stage.startswith("backward"):
            tracker.enter(stage)

    return enter


def _growth(tracker: StorageTracker, static: BytesByCategory) -> dict[str, BytesByCategory]:
    """Return the bytes that one more inner block adds to the peak of each stage."""
    starts = tracker.starts
    forward = static + _minus(starts["forward, last block"], starts["forward, inner block"])
    backward = _minus(starts["backward, first block"], starts["backward, inner block"])
    # Inner blocks run in sequence, so memory peaks at the first or the last of them.
    peak = backward if backward.total() > 0 else Counter()
    gradients = static["gradients"] or static["parameters"]
    return {
        "forward, first block": static,
        "forward, inner block": forward,
        "forward, last block": forward,
        "head": forward,
        "backward, last block": forward,
        "backward, inner block": forward + peak,
        "backward, first block": _minus(forward, backward, -1),
        "update": static | Counter({"gradients": gradients}),
    }


def _minus(left: BytesByCategory, right: BytesByCategory, times: int = 1) -> BytesByCategory:
    """Return left − times · right, including negative entries."""
    return Counter({key: left[key] - times * right[key] for key in left.keys() | right.keys()})
