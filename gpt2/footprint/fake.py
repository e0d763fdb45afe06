"""A fake training step at full size, and what it needs at the configured depth.

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

# The first block, one that stands for all in between, and the last.
_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one step needs: for each stage the bytes alive at its peak, and all FLOPs."""

    peaks: dict[str, Bytes]
    flops: float


class FakeTraining:
    """Model, optimizer and pruner of a configuration, as fake tensors, after a first update.

    The model has at most three blocks; ``needs`` reckons the others in. fp16 is taken as bf16,
    which has its size, because a gradient scaler reads numbers.
    """

    def __init__(self, config: Config) -> None:
        shape = config.model.shape
        # Blocks of the real model for each of those between the first and the last.
        self.more = max(0, shape.n_layer - _BLOCKS)
        shape = dataclasses.replace(shape, n_layer=min(shape.n_layer, _BLOCKS))
        precision = "fp32" if config.machine.precision == "fp32" else "bf16"
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, shape=shape),
            machine=dataclasses.replace(config.machine, device="cpu", precision=precision),
        )
        self.doing = "building the model"
        with self._named_errors(), Tracker():
            self._build()

    @property
    def parameters(self) -> int:
        """Built parameters of the configured model."""
        others = sum(p.numel() for p in self.model.h[1].parameters()) if self.more else 0
        return self.model.num_params() + self.more * others

    def needs(self, target: Gpu | None, batch: int) -> Needs:
        """What a step of micro-batches of ``batch`` sequences needs with the target's kernels.

        RunError names the place and the operation where dimensions do not fit.
        """
        tracker = Tracker()
        backend = self.config.model.attention.backend
        with self._named_errors(), kernels_of(target, backend, tracker), tracker:
            static = self._known(tracker)
            hooks = self._hooks(tracker)
            try:
                tokens = self.config.model.shape.block_size + 1
                tokens_BT = torch.empty((batch, tokens), dtype=torch.long)
                self.training.step([tokens_BT], _Before(self.training.pruner, tracker))
            finally:
                for hook in hooks:
                    hook.remove()
        return self._at_full_depth(tracker, static)

    def _build(self) -> None:
        self.training = Training(self.config)
        self.model = self.training.model
        for name, part in self.model.named_modules():
            part.register_forward_pre_hook(partial(self._forward_of, name))
        # The first update makes the optimizer's state.
        self._set_gradients()
        self.training.optimizer.step(gradient_norm=torch.zeros(()))
        self.training.optimizer.zero_grad()

    def _set_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)

    def _known(self, tracker: Tracker) -> Bytes:
        """Count what lives from step to step; returns it for the block in between."""
        state = self.training.optimizer.state
        masks = self.training.pruner.state_dict().get("masks", {})
        names = {p: name for name, p in self.model.named_parameters()}
        inner = set(self.model.h[1].parameters()) if self.more else set()
        accumulates = self.config.train.grad_accumulation > 1
        if accumulates:
            # As the second micro-batch finds them.
            self._set_gradients()
        static: Bytes = Counter()
        for p, name in names.items():
            held = [("parameters", p)]
            held += [("optimizer", s) for s in state[p].values() if isinstance(s, Tensor)]
            held += [("optimizer", masks[name])] if name in masks else []
            held += [("gradients", p.grad)] if accumulates else []
            for category, tensor in held:
                tracker.is_now(tensor, category)
                if p in inner:
                    static[category] += tensor.untyped_storage().nbytes()
        return static

    def _hooks(self, tracker: Tracker) -> list[RemovableHandle]:
        """Enter a stage before each block's forward and backward, the head and the update."""
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
        """A forward hook: the gradient of the block's output is there when its backward begins."""

        def enter(gradient: Tensor) -> None:
            self.doing = f"backward, {name}"
            tracker.enter(self.doing)
            tracker.making = "temporaries"

        def watch(block: nn.Module, inputs: Any, outputs: Any) -> None:
            outputs[0].register_hook(enter)

        return watch

    def _forward_of(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.doing = f"forward of {name or 'the model'}"

    def _at_full_depth(self, tracker: Tracker, static: Bytes) -> Needs:
        """Add what the blocks that were left out hold at the peak of each stage."""
        if not self.more:
            return Needs(tracker.peaks, sum(tracker.flops.values()))
        starts = tracker.starts
        kept = _minus(starts["forward, last block"], starts["forward, inner block"])
        undone = _minus(starts["backward, first block"], starts["backward, inner block"])
        # Inner blocks run one after the other: whichever end of the row holds more decides.
        most = undone if undone.total() > 0 else Counter()
        gradients = static["gradients"] or static["parameters"]
        extra = {
            "forward, first block": static,
            "forward, inner block": static + kept,
            "forward, last block": static + kept,
            "head": static + kept,
            "backward, last block": static + kept,
            "backward, inner block": static + kept + most,
            "backward, first block": _minus(static + kept, undone, -1),
            "update": static | Counter({"gradients": gradients}),
        }
        peaks = {
            stage: _minus(peak, extra[stage], -self.more) for stage, peak in tracker.peaks.items()
        }
        inner = tracker.flops["forward, inner block"] + tracker.flops["backward, inner block"]
        return Needs(peaks, sum(tracker.flops.values()) + self.more * inner)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn what torch says of dimensions into a Problem with a place in the source."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        before, log.disabled = log.disabled, True
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            what = f"{self.doing}: {str(error).splitlines()[0]}"
            raise RunError(Problem(what, _place(error))) from error
        finally:
            log.disabled = before


class _Before:
    """The pruner, which is the first to be asked after backward: the update begins."""

    def __init__(self, pruner: Pruner, tracker: Tracker) -> None:
        self.pruner, self.tracker = pruner, tracker

    def mask_gradients(self) -> None:
        """Enter the stage, then as the pruner does."""
        self.tracker.enter("update")
        self.pruner.mask_gradients()

    def observe(self, gradient_norm: Tensor) -> None:
        """As the pruner does."""
        self.pruner.observe(gradient_norm)


def _entering(tracker: Tracker, stage: str) -> Any:
    """A forward pre-hook that enters ``stage``, unless a backward pass computes a block again."""

    def enter(module: nn.Module, inputs: Any) -> None:
        if not tracker.stage.startswith("backward"):
            tracker.enter(stage)

    return enter


def _block_name(index: int, blocks: int) -> str:
    if index == blocks - 1:
        return "last block"
    return "inner block" if index else "first block"


def _minus(left: Bytes, right: Bytes, times: int = 1) -> Bytes:
    """left − times · right, also where that is negative."""
    return Counter({key: left[key] - times * right[key] for key in left.keys() | right.keys()})


def _place(error: BaseException) -> str:
    """file:line of the innermost frame in the product; empty where torch alone was running."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(ROOT / "gpt2")]
    inside = [f for f in inside if "footprint" not in Path(f.filename).parts]
    if not inside:
        return ""
    return f"{Path(inside[-1].filename).relative_to(ROOT)}:{inside[-1].lineno}"
