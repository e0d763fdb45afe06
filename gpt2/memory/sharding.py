"""Bytes of sharded parameters (FSDP2) in a step without memory.

The step computes with whole parameters and gradients. This module counts the rows that a rank stores
instead, and the buffers of torch's ``fully_shard``: a block is gathered into a flat buffer and copied
into its parameters; the buffer lives until the next block is gathered. In the backward pass, the
block before is gathered ahead, and the whole gradients of a block are copied into the input of a
reduce-scatter, which lives until the next one.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpt2.memory.tracker import StorageTracker


class ShardedParameters:
    """Parameters of a model divided over ``ranks``, as seen by ``tracker``; 1 divides nothing."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], ranks: int) -> None:
        self.ranks, self._blocks = ranks, list(blocks)
        inner = {p for block in self._blocks for p in block.parameters()}
        self._outer = [p for p in model.parameters() if p not in inner]
        # Bytes of the gathered block, of its copy or the one gathered ahead, and of the input of a
        # reduce-scatter.
        self._gathered = self._ahead = self._reduced = 0
        self._in_backward: nn.Module | None = None
        self._accumulates = False

    def shard_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of the first rank's rows of a tensor in the shape of a parameter."""
        size = tensor.untyped_storage().nbytes()
        if self.ranks == 1 or not tensor.ndim:
            return size
        rows = len(tensor)
        return size // rows * -(-rows // self.ranks)

    def stored_bytes(self) -> int:
        """Return the bytes of all parameters on a rank between steps."""
        return sum(self.shard_bytes(p) for p in self._outer) + sum(
            self.shard_bytes(p) for block in self._blocks for p in block.parameters()
        )

    def begin(self, tracker: StorageTracker, accumulates: bool) -> list[RemovableHandle]:
        """Gather the parameters outside of the blocks; return hooks for the blocks.

        If the step ``accumulates``, gradients of earlier micro-batches exist.
        """
        self._gathered = self._ahead = self._reduced = 0
        self._in_backward, self._accumulates = None, accumulates
        if self.ranks == 1:
            return []
        outer = self._whole_bytes(self._outer)
        tracker.hold("parameters", outer)
        self._set_ahead(tracker, outer)
        handles = []
        for index, block in enumerate(self._blocks):
            before = self._blocks[index - 1] if index else None
            handles += [
                block.register_forward_pre_hook(partial(self._before, tracker)),
                block.register_forward_hook(partial(self._after, tracker, before)),
            ]
        return handles

    def end(self, tracker: StorageTracker) -> None:
        """Reduce the last gradients; from now on, operations compute on one rank's rows."""
        if self.ranks == 1:
            return
        self._leave(tracker)
        tracker.hold("parameters", -self._whole_bytes(self._outer))
        self._reduce(tracker, self._outer)
        self._set_reduced(tracker, 0)
        self._set_ahead(tracker, 0)
        tracker.divide(self.ranks)

    def _whole_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of gathered parameters, which have equal parts of all ranks."""
        return self.ranks * sum(self.shard_bytes(p) for p in parameters)

    def _before(self, tracker: StorageTracker, block: nn.Module, inputs: Any) -> None:
        """Gather a block for its forward pass, unless a backward pass recomputes it."""
        if self._in_backward is None and not tracker.stage.startswith("backward"):
            size = self._whole_bytes(block.parameters())
            # The buffers of this block and of the one before are alive together.
            tracker.hold("parameters", size)
            self._set_ahead(tracker, size)
            self._gathered = size

    def _after(
        self,
        tracker: StorageTracker,
        before: nn.Module | None,
        block: nn.Module,
        inputs: Any,
        outputs: Any,
    ) -> None:
        """Free a block after its forward pass, and watch its backward pass."""
        if tracker.stage.startswith("backward"):
            return
        tracker.hold("parameters", -self._gathered)
        self._gathered = 0

        def enter(gradient: Tensor) -> None:
            self._leave(tracker)
            self._in_backward = block
            self._gathered = self._whole_bytes(block.parameters())
            tracker.hold("parameters", self._gathered)
            # Also for the first block, so that all blocks add the same bytes.
            self._set_ahead(tracker, self._whole_bytes((before or block).parameters()))

        outputs[0].register_hook(enter)

    def _leave(self, tracker: StorageTracker) -> None:
        """Free a block after its backward pass, and reduce its gradients."""
        if self._in_backward is None:
            self._set_ahead(tracker, 0)
            return
        tracker.hold("parameters", -self._gathered)
        self._gathered = 0
        self._reduce(tracker, self._in_backward.parameters())
        self._in_backward = None

    def _reduce(self, tracker: StorageTracker, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        self._set_reduced(tracker, 0)
        self._set_reduced(tracker, self._whole_bytes(parameters))
        for p in parameters:
            if p.grad is not None:
                # Gradients of earlier micro-batches are counted already.
                size = 0 if self._accumulates else self.shard_bytes(p.grad)
                tracker.is_now(p.grad, "gradients", size)

    def _set_ahead(self, tracker: StorageTracker, size: int) -> None:
        tracker.hold("parameters", size)
        tracker.hold("parameters", -self._ahead)
        self._ahead = size

    def _set_reduced(self, tracker: StorageTracker, size: int) -> None:
        tracker.hold("gradients", size - self._reduced)
        self._reduced = size
