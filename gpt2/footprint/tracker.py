"""Storages of a fake training step: bytes alive by category, and their peak.

The step is divided into stages, one for each part of the model and direction. Inner blocks are
alike, so a model of three blocks determines the memory of any depth: the peak of each stage grows
with the number of inner blocks by the bytes that one such block has left behind by then.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.footprint.cost import flops, scratch_bytes
from gpt2.footprint.hollow import shape_only

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries")
# Bytes per category.
Bytes = Counter[str]


class Tracker(TorchDispatchMode):
    """Bytes alive by category, and for each stage its start, its peak and its FLOPs.

    Storages created while ``making`` is "activations" are saved for backward or are temporaries of
    the forward pass; afterwards, storages other than gradients are temporaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.making = "activations"
        self.stage = "forward, first block"
        self.starts: dict[str, Bytes] = {}
        self._peaks: dict[str, dict[str, int]] = {}
        self.flops: dict[str, float] = defaultdict(float)
        # A plain dictionary: it is copied at every new peak, and copies of a Counter are slow.
        self._alive = dict.fromkeys(CATEGORIES, 0)
        # The storage's address → its watcher, bytes and category.
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._total = self._highest = 0
        # Whether bytes of new storages count, and the factor on FLOPs.
        self._bytes_count, self._flops_count = True, 1.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and guards on every call would double the time.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Infer the operation's outputs, then track their new storages."""
        out = shape_only(func, args, kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.see(tensor, self.making)
        if count := flops(func, args):
            self.compute(count)
        if scratch := scratch_bytes(func, args):
            self._note(scratch)
        return out

    @property
    def peaks(self) -> dict[str, Bytes]:
        """Return the bytes alive at the peak of each stage."""
        return {stage: Counter(peak) for stage, peak in self._peaks.items()}

    def enter(self, stage: str) -> None:
        """Enter ``stage``, which may be entered several times."""
        self.stage = stage
        self.starts[stage] = Counter(self._alive)
        self._highest = sum(self._peaks[stage].values()) if stage in self._peaks else 0
        self._note(0)

    def see(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's storage, unless it is already tracked."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() if self._bytes_count else 0
        watcher = weakref.ref(storage, partial(self._free, key))
        self._storages[key] = (watcher, size, category)
        self._alive[category] += size
        self._total += size
        if self._total > self._highest:
            self._note(0)

    def compute(self, flops: float) -> None:
        """Add FLOPs of work that dispatches no operation."""
        self.flops[self.stage] += flops * self._flops_count

    def is_now(self, tensor: Tensor, category: str) -> None:
        """Move the tensor's storage to ``category``."""
        self.see(tensor, category)
        key = tensor.untyped_storage()._cdata
        watcher, size, before = self._storages[key]
        self._alive[before] -= size
        self._alive[category] += size
        self._storages[key] = (watcher, size, category)

    @contextmanager
    def standing_for(self, share: float) -> Iterator[None]:
        """Count only a ``share`` of FLOPs, and no memory, inside the context.

        Use it for one large operation that replaces many small ones, whose memory is measured
        separately.
        """
        self._bytes_count, self._flops_count = False, share
        try:
            yield
        finally:
            self._bytes_count, self._flops_count = True, 1.0

    def _note(self, scratch: int) -> None:
        """Record the peak of the stage if ``scratch`` additional temporary bytes exceed it."""
        if self._total + scratch <= self._highest:
            return
        self._highest = self._total + scratch
        peak = self._peaks[self.stage] = self._alive.copy()
        peak["temporaries"] += scratch

    def _free(self, key: int, watcher: Any) -> None:
        _, size, category = self._storages.pop(key)
        self._alive[category] -= size
        self._total -= size
