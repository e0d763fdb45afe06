"""A fake training step at full size, and its memory and FLOPs at the configured depth.

B micro-batch, T tokens.
"""

import dataclasses
import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpt2.config import Config
from gpt2.footprint.kernels import kernels_of
from gpt2.footprint.tracker import Bytes, Tracker
from gpt2.footprint.training import Training
from lib.errors import Problem, RunError
from lib.machine.gpus import Gpu
from lib.pruning.contract import Pruner
from lib.project import ROOT

# The first block, one that represents all inner blocks, and the last.
_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Needs:
    """Peak bytes of each stage of a step, by category, and the step's FLOPs."""

    peaks: dict[str, Bytes]
    flops: float


class FakeTraining:
    """Model, optimizer and pruner of a configuration as fake tensors, after a first update.

    At most three blocks are built; ``needs`` extrapolates to the configured depth. fp16 is replaced
    by bf16, which has the same size, because a gradient scaler reads values.
    """

    def __init__(self, config: Config) -> None:
        shape = config.model.shape
        # Inner blocks of the real model that are not built.
        self.omitted = max(0, shape.n_layer - _BLOCKS)
        shape = dataclasses.replace(shape, n_layer=min(shape.n_layer, _BLOCKS))
        precision = "fp32" if config.machine.precision == "fp32" else "bf16"
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, shape=shape),
            machine=dataclasses.replace(config.machine, device="cpu", precision=precision),
        )
        self.location = "building the model"
        with self._named_errors(), Tracker():
            self._build()

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the configured model."""
        others = sum(p.numel() for p in self.model.h[1].parameters()) if self.omitted else 0
        return self.model.num_params() + self.omitted * others

    def needs(self, target: Gpu | None, batch: int) -> Needs:
        """Return the needs of a step of micro-batches of ``batch`` sequences on ``target``.

        Raises RunError with source line and operation if dimensions do not fit.
        """
        tracker = Tracker()
        backend = self.config.model.attention.backend
        with self._named_errors(), kernels_of(target, backend, tracker), tracker:
            static = self._track_static(tracker)
            hooks = self._hooks(tracker)
            try:
                tokens = self.config.model.shape.block_size + 1
                tokens_BT = torch.empty((batch, tokens), dtype=torch.long)
                self.training.step([tokens_BT], _UpdateStage(self.training.pruner, tracker))
            finally:
                for hook in hooks:
                    hook.remove()
        return self._at_full_depth(tracker, static)

    def _build(self) -> None:
        self.training = Training(self.config)
        self.model = self.training.model
        for name, part in self.model.named_modules():
            part.register_forward_pre_hook(partial(self._forward_of, name))
        # The first update creates the optimizer's state.
        self._set_gradients()
        self.training.optimizer.step(gradient_norm=torch.zeros(()))
        self.training.optimizer.zero_grad()

    def _set_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)

    def _track_static(self, tracker: Tracker) -> Bytes:
        """Track tensors that persist between steps. Return their bytes for an inner block."""
        state = self.training.optimizer.state
        masks = self.training.pruner.state_dict().get("masks", {})
        names = {p: name for name, p in self.model.named_parameters()}
        inner = set(self.model.h[1].parameters()) if self.omitted else set()
        accumulates = self.config.train.grad_accumulation > 1
        if accumulates:
            # Gradients exist from the second micro-batch on.
            self._set_gradients()
        static: Bytes = Counter()
        for p, name in names.items():
            tensors = [("parameters", p)]
            tensors += [("optimizer", s) for s in state[p].values() if isinstance(s, Tensor)]
            tensors += [("optimizer", masks[name])] if name in masks else []
            tensors += [("gradients", p.grad)] if accumulates else []
            for category, tensor in tensors:
                tracker.is_now(tensor, category)
                if p in inner:
                    static[category] += tensor.untyped_storage().nbytes()
        return static

    def _hooks(self, tracker: Tracker) -> list[RemovableHandle]:
        """Register hooks that enter a stage before each block, the head and the update."""
        hooks = []
        for index, block in enumerate(self.model.h):
            name = _block_name(index, len(self.model.h))
            hooks.append(block.register_forward_pre_hook(_entering(tracker, f"forward, {name}")))
            hooks.append(block.register_forward_hook(self._watch_backward(tracker, name)))
        hooks.append(self.model.ln_f.register_forward_pre_hook(_entering(tracker, "head")))
        for p in self.model.parameters():
            hook = p.register_post_accumulate_grad_hook(
                lambda p: tracker.is_now(p.grad, "gradients")
            )
            hooks.append(hook)
        return hooks

    def _watch_backward(self, tracker: Tracker, name: str) -> Any:
        """Return a forward hook that enters the stage of a block's backward pass.

        The backward pass of a block begins with the gradient of its output.
        """

        def enter(gradient: Tensor) -> None:
            self.location = f"backward, {name}"
            tracker.enter(self.location)
            tracker.making = "temporaries"

        def watch(block: nn.Module, inputs: Any, outputs: Any) -> None:
            outputs[0].register_hook(enter)

        return watch

    def _forward_of(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.location = f"forward of {name or 'the model'}"

    def _at_full_depth(self, tracker: Tracker, static: Bytes) -> Needs:
        """Add the memory of omitted blocks to the peak of each stage."""
        if not self.omitted:
            return Needs(tracker.peaks, sum(tracker.flops.values()))
        starts = tracker.starts
        activations = _minus(starts["forward, last block"], starts["forward, inner block"])
        backward_growth = _minus(starts["backward, first block"], starts["backward, inner block"])
        # Inner blocks run in sequence, so memory peaks at the first or the last of them.
        peak_growth = backward_growth if backward_growth.total() > 0 else Counter()
        gradients = static["gradients"] or static["parameters"]
        extra = {
            "forward, first block": static,
            "forward, inner block": static + activations,
            "forward, last block": static + activations,
            "head": static + activations,
            "backward, last block": static + activations,
            "backward, inner block": static + activations + peak_growth,
            "backward, first block": _minus(static + activations, backward_growth, -1),
            "update": static | Counter({"gradients": gradients}),
        }
        peaks = {
            stage: _minus(peak, extra[stage], -self.omitted)
            for stage, peak in tracker.peaks.items()
        }
        inner = tracker.flops["forward, inner block"] + tracker.flops["backward, inner block"]
        return Needs(peaks, sum(tracker.flops.values()) + self.omitted * inner)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert torch's shape errors into a Problem with a source line."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        before, log.disabled = log.disabled, True
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            what = f"{self.location}: {str(error).splitlines()[0]}"
            problem = Problem(what, _source_line(error), code="model.shape-mismatch")
            raise RunError(problem) from error
        finally:
            log.disabled = before


class _UpdateStage:
    """Wrapper of the pruner, whose first call after backward starts the update stage."""

    def __init__(self, pruner: Pruner, tracker: Tracker) -> None:
        self.pruner, self.tracker = pruner, tracker

    def mask_gradients(self) -> None:
        """Enter the update stage, then mask gradients."""
        self.tracker.enter("update")
        self.pruner.mask_gradients()

    def observe(self, gradient_norm: Tensor) -> None:
        """Call the pruner."""
        self.pruner.observe(gradient_norm)


def _entering(tracker: Tracker, stage: str) -> Any:
    """Return a forward pre-hook that enters ``stage``.

    The stage does not change if a backward pass recomputes a block.
    """

    def enter(module: nn.Module, inputs: Any) -> None:
        if not tracker.stage.startswith("backward"):
            tracker.enter(stage)

    return enter


def _block_name(index: int, blocks: int) -> str:
    if index == blocks - 1:
        return "last block"
    return "inner block" if index else "first block"


def _minus(left: Bytes, right: Bytes, times: int = 1) -> Bytes:
    """Return left − times · right, including negative entries."""
    return Counter({key: left[key] - times * right[key] for key in left.keys() | right.keys()})


def _source_line(error: BaseException) -> str:
    """Return file:line of the innermost frame in the product, or "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(ROOT / "gpt2")]
    inside = [f for f in inside if "footprint" not in Path(f.filename).parts]
    if not inside:
        return ""
    return f"{Path(inside[-1].filename).relative_to(ROOT)}:{inside[-1].lineno}"
