"""Bytes of sharded parameters (FSDP2) in a step without memory.

The step computes with whole parameters and gradients. This module counts the rows that a rank stores
instead, and the buffers of torch's ``fully_shard``: the parameters outside of the blocks, a block and the
next one, gathered; and the whole gradients of a block beside the input of their reduce-scatter.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from gpt2.memory.tracker import StorageTracker


class ShardedParameters:
    """Parameters of a model divided over ``ranks``, as seen by ``tracker``; 1 divides nothing."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], ranks: int) -> None:
        self.ranks, self._parameters = ranks, list(model.parameters())
        in_blocks = [list(block.parameters()) for block in blocks]
        inner = {p for block in in_blocks for p in block}
        self._outer = self._whole_bytes(p for p in self._parameters if p not in inner)
        block = max(map(self._whole_bytes, in_blocks))
        self._held = {"parameters": self._outer + 2 * block, "gradients": 2 * block}

    def shard_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of the first rank's rows of a tensor in the shape of a parameter."""
        size = tensor.untyped_storage().nbytes()
        if self.ranks == 1 or not tensor.ndim:
            return size
        rows = len(tensor)
        return size // rows * -(-rows // self.ranks)

    def stored_bytes(self) -> int:
        """Return the bytes of all parameters on a rank between steps."""
        return sum(map(self.shard_bytes, self._parameters))

    def begin(self, tracker: StorageTracker) -> None:
        """Count the buffers of the passes of a step."""
        for category, size in self._held.items() if self.ranks > 1 else ():
            tracker.hold(category, size)

    def reduced(self, tracker: StorageTracker, parameter: nn.Parameter, accumulates: bool) -> None:
        """Count a new gradient; if the step ``accumulates``, one of rows is counted already."""
        assert parameter.grad is not None
        size = self.shard_bytes(parameter.grad)
        tracker.is_now(parameter.grad, "gradients", 0 if accumulates and self.ranks > 1 else size)

    def end(self, tracker: StorageTracker) -> None:
        """Reduce the last gradients; from now on, operations compute on one rank's rows."""
        if self.ranks > 1:
            for category, size in self._held.items():
                tracker.hold(category, -size)
            for size in (self._outer, -self._outer):
                tracker.hold("gradients", size)
            tracker.divide(self.ranks)

    def _whole_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of gathered parameters, which have equal parts of all ranks."""
        return self.ranks * sum(self.shard_bytes(p) for p in parameters)
