"""Bytes alive, their peaks and FLOPs of operations on tensors without memory.

Tensors of the meta device infer the outputs of an operation, once per combination of shapes.
Outputs are CPU tensors whose storages share one reserved address range that is never touched.
Autograd, autocast and views are torch's own. torch's FakeTensorMode infers the same outputs, but
takes eight times as long.

A step is divided into stages, one for each part of the model and direction. Inner blocks are alike,
so a model of three blocks determines the memory of any depth: the peak of each stage grows with the
number of inner blocks by the bytes that one such block has left behind by then.

Multiply and add count as two FLOPs. B batch, N heads, T queries, S keys, H head dim.
"""

import mmap
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch._meta_registrations  # operations on the meta device
import torch.nn.attention.varlen  # registers packed attention
from torch import Generator, Tensor
from torch.fx.experimental import _config as config
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.nsa import block_major  # noqa: F401 (registers kablate's operations with torch)
from gpt2.nsa.options import selected_pairs

_aten = torch.ops.aten


def temporary_bytes(func: Any, args: Any) -> int:
    """Return the temporary bytes of a running kernel, which its fake implementation omits.

    The backward pass of flash and of memory-efficient attention accumulates dq in fp32 and stores Σ
    do·o of every query (Dao 2023, arXiv 2307.08691, algorithm 2).
    """
    if func not in (_FLASH_BACKWARD, _EFFICIENT_BACKWARD, _VARLEN_BACKWARD):
        return 0
    q_BNTH: Tensor = args[1]
    return 4 * (q_BNTH.numel() + q_BNTH.numel() // q_BNTH.shape[-1])


def _product(args: Any) -> float:
    left, right = args[-2:]
    return 2.0 * left.numel() * right.shape[-1]


def _attention(products: int, queries_at: int, causal_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H; a causal kernel only computes the visible pairs.

    ``queries_at`` is the argument index of q, followed by k; ``causal_at`` that of the causal flag.
    """

    def count(args: Any) -> float:
        q_BNTH, k_BKSH = args[queries_at : queries_at + 2]
        batch, heads, queries, width = q_BNTH.shape
        keys = k_BKSH.shape[2]
        # torch omits trailing arguments that have their default value.
        causal = len(args) > causal_at and args[causal_at]
        pairs = queries * (queries + 1) / 2 if causal else queries * keys
        return 2.0 * products * batch * heads * pairs * width

    return count


def _selected(products: int, queries_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H over the pairs of a block selection."""

    def count(args: Any) -> float:
        q_BKgTH, (blocks_BKTn, size) = args[queries_at], args[-2:]
        length = q_BKgTH.shape[3]
        pairs = selected_pairs(length, size, blocks_BKTn.shape[-1])
        return 2.0 * products * q_BKgTH.numel() / length * pairs

    return count


def _packed(products: int, keys_at: int, heads_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H over packed rows, whose queries share one key head.

    ``keys_at`` is the argument index of the keys, ``heads_at`` that of the queries of a row.
    """

    def count(args: Any) -> float:
        return 2.0 * products * args[heads_at] * args[keys_at].numel()

    return count


_FLASH = _aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_CPU_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_VARLEN = torch.ops.torch_attn._varlen_attn.default
_VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default
# Forward computes q kᵀ and p v; backward recomputes the scores, and computes dv, dp, dq and dk.
_FLOPS: dict[Any, Callable[[Any], float]] = {
    _aten.mm.default: _product,
    _aten.mm.out: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    _aten.addmm_.default: _product,
    _aten.baddbmm.default: _product,
    _FLASH: _attention(2, 0, 4),
    _FLASH_BACKWARD: _attention(5, 1, 11),
    _CPU_FLASH: _attention(2, 0, 4),
    _CPU_FLASH_BACKWARD: _attention(5, 1, 7),
    _EFFICIENT: _attention(2, 0, 6),
    _EFFICIENT_BACKWARD: _attention(5, 1, 11),
    torch.ops.kablate.selected.default: _selected(2, 0),
    torch.ops.kablate.selected_backward.default: _selected(5, 1),
    _VARLEN: _packed(2, 1, 5),
    _VARLEN_BACKWARD: _packed(5, 2, 8),
}

# Creates an output from the tensor arguments.
Maker = Callable[[list[Tensor]], Any]
# Replaces makers for an operation that returns a view.
_VIEW = "view"
# Linux: do not reserve swap space. Python's mmap defines this flag from 3.13 on.
_MAP_NORESERVE = 0x4000

_reserved = mmap.mmap(-1, mmap.PAGESIZE)
_results: dict[Any, Any] = {}
_META = torch.device("meta")
_SCALARS = {int, float, bool, type(None), torch.dtype, torch.device}


def infer_outputs(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Return the outputs of ``func`` without computing values, and its FLOPs.

    Raises torch's errors if shapes do not fit. Call it from ``__torch_dispatch__``, after autograd
    and autocast.
    """
    # Views, and profiler marks set by optimizers.
    if func.is_view or func.namespace == "profiler":
        return func(*args, **kwargs), 0.0
    key = func, *map(_key, args), *map(_key, kwargs.items())
    result = _results.get(key)
    if result is None:
        result = _results[key] = _infer(func, args, kwargs)
    if result is _VIEW:
        return func(*args, **kwargs), 0.0
    pack, makers, count, in_place = result
    tensors = _tensors(args, kwargs) if in_place else []
    outputs = [make(tensors) for make in makers]
    return pack(outputs) if pack else outputs[0], count


def _infer(func: Any, args: Any, kwargs: Any) -> Any:
    """Return how to pack the outputs, a maker for each, the FLOPs, and whether an output is an input.

    They are inferred by tensors without memory. A size that depends on values is the largest one:
    a mask selects all elements.
    """
    meta_args, meta_kwargs = _on_meta(args), {k: _on_meta(v) for k, v in kwargs.items()}
    # torch adds patch() to the module at import.
    with config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        out = func(*meta_args, **meta_kwargs)
    tensors = _tensors(meta_args, meta_kwargs)
    storages = {t.untyped_storage()._cdata for t in tensors}
    makers: list[Maker] = []
    for value in out if isinstance(out, tuple | list) else (out,):
        indices = [i for i, tensor in enumerate(tensors) if tensor is value]
        if indices:
            makers.append(itemgetter(indices[0]))
        elif not isinstance(value, Tensor):
            makers.append(partial(_constant, value))
        elif value.untyped_storage()._cdata in storages:
            return _VIEW
        else:
            size = value.untyped_storage().nbytes()
            makers.append(partial(_new, value.shape, value.stride(), value.dtype, size))
    pack = type(out) if isinstance(out, tuple | list) else None
    in_place = any(isinstance(maker, itemgetter) for maker in makers)
    count = _FLOPS[func](meta_args) if func in _FLOPS else 0.0
    return pack, makers, count, in_place


def _constant(value: Any, tensors: list[Tensor]) -> Any:
    return value


def _new(shape: Any, strides: Any, dtype: torch.dtype, size: int, tensors: list[Tensor]) -> Tensor:
    global _reserved
    if size == 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    if size > len(_reserved):
        # The old mapping lives as long as a tensor uses it.
        _reserved = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    flat = torch.frombuffer(_reserved, dtype=dtype, count=size // dtype.itemsize)
    return flat.as_strided(shape, strides)


def _key(value: Any) -> Any:
    """Return the part of an argument that determines the outputs; 1, 1.0 and True differ."""
    kind = type(value)
    # isinstance() of a scalar or a Generator is slower than the rest of this function.
    if kind in _SCALARS:
        return kind, value
    if kind is Generator:
        return kind
    if kind is Tensor or isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, tuple | list) else (kind, value)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that are tensors, including those in lists."""
    values = (v if isinstance(v, tuple | list) else (v,) for v in (*args, *kwargs.values()))
    return [tensor for value in values for tensor in value if isinstance(tensor, Tensor)]


def _on_meta(value: Any) -> Any:
    """Return an argument with its tensors, and its device, on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, tuple | list):
        return type(value)(map(_on_meta, value))
    return _META if isinstance(value, torch.device) else value


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries")
# Bytes per category.
BytesByCategory = Counter[str]


class StorageTracker(TorchDispatchMode):
    """Bytes alive by category, and for each stage its start, its peak and its FLOPs.

    Storages created while ``making`` is "activations" are saved for backward or are temporaries of
    the forward pass; afterwards, storages other than gradients are temporaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.making = "activations"
        self.stage = "forward, first block"
        self.starts: dict[str, BytesByCategory] = {}
        self._peaks: dict[str, dict[str, int]] = {}
        self.flops: dict[str, float] = defaultdict(float)
        # A plain dictionary: it is copied at every new peak, and copies of a Counter are slow.
        self._alive = dict.fromkeys(CATEGORIES, 0)
        # The storage's address → its watcher, bytes and category.
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._total = self._highest = 0
        # The factors on bytes of new storages and on FLOPs.
        self._bytes_count, self._flops_count = 1.0, 1.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and guards on every call would double the time.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Infer the operation's outputs, then track their new storages."""
        if func is _aten._local_scalar_dense.default:
            # There is no value. Checks of finiteness pass, and a gradient scaler counts no overflow.
            return args[0].dtype == torch.bool
        out, count = infer_outputs(func, args, kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.see(tensor, self.making)
        if count:
            self.compute(count)
            if scratch := temporary_bytes(func, args):
                self._note(scratch)
        return out

    @property
    def peaks(self) -> dict[str, BytesByCategory]:
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
        size = round(storage.nbytes() * self._bytes_count)
        watcher = weakref.ref(storage, partial(self._free, key))
        self._storages[key] = (watcher, size, category)
        self._alive[category] += size
        self._total += size
        if self._total > self._highest:
            self._note(0)

    def compute(self, flops: float) -> None:
        self.flops[self.stage] += flops * self._flops_count

    def is_now(self, tensor: Tensor, category: str, size: int | None = None) -> None:
        """Move the tensor's storage to ``category``; ``size`` is its number of bytes from now on."""
        self.see(tensor, category)
        key = tensor.untyped_storage()._cdata
        watcher, counted, before = self._storages[key]
        size = counted if size is None else size
        self._alive[before] -= counted
        self._alive[category] += size
        self._total += size - counted
        self._storages[key] = (watcher, size, category)

    @contextmanager
    def standing_for(self, share: float) -> Iterator[None]:
        """Count only a ``share`` of FLOPs, and no memory, inside the context.

        Use it for one large operation that replaces small ones, whose memory is measured separately.
        """
        before = self._bytes_count, self._flops_count
        self._bytes_count, self._flops_count = 0.0, share
        try:
            yield
        finally:
            self._bytes_count, self._flops_count = before

    def divide(self, parts: int) -> None:
        """Count one of ``parts`` equal parts of each operation from now on."""
        self._bytes_count, self._flops_count = 1.0 / parts, 1.0 / parts

    def hold(self, category: str, size: int) -> None:
        """Count ``size`` bytes that no storage represents; release them with a negative size."""
        self._alive[category] += size
        self._total += size
        self._note(0)

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
