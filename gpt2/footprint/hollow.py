"""Tensors with shape, type and storage but without memory, and operations on their shapes.

torch's fake tensors infer the outputs of an operation, but are slow: every operation, including
views, passes through Python several times. So each operation is inferred once per combination of
shapes. Outputs are CPU tensors whose storages share one reserved address range that is never
touched. Autograd, autocast and views are torch's own.
"""

import mmap
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# Creates an output from the tensor arguments.
Maker = Callable[[list[Tensor]], Any]
# Replaces makers for an operation that returns a view.
_VIEW = "view"
# Linux: do not reserve swap space. Python's mmap defines this flag from 3.13 on.
_MAP_NORESERVE = 0x4000

_reserved = mmap.mmap(-1, mmap.PAGESIZE)
_results: dict[Any, Any] = {}
_fake = FakeTensorMode()


def shape_only(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the outputs of ``func`` without computing values.

    Raises torch's errors if shapes do not fit. Call it from ``__torch_dispatch__``, after autograd
    and autocast.
    """
    # Profiler marks set by optimizers.
    if func.namespace == "profiler":
        return func(*args, **kwargs)
    key = func, *map(_key, args), *map(_key, kwargs.items())
    result = _results.get(key)
    if result is None:
        result = _results[key] = _infer(func, args, kwargs)
    if result is _VIEW:
        return func(*args, **kwargs)
    pack, makers = result
    tensors = _tensors(args, kwargs)
    outputs = [make(tensors) for make in makers]
    return pack(outputs) if pack else outputs[0]


def _infer(func: Any, args: Any, kwargs: Any) -> Any:
    """Return how to pack the outputs, and a maker for each, inferred by torch's fake tensors."""
    if func.is_view:
        return _VIEW
    with _fake:
        fake_args, fake_kwargs = _faked(args), {k: _faked(v) for k, v in kwargs.items()}
        out = func(*fake_args, **fake_kwargs)
    tensors = _tensors(fake_args, fake_kwargs)
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
    return type(out) if isinstance(out, tuple | list) else None, makers


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
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    # isinstance() of a Generator is slower than the rest of this function.
    return Generator if type(value) is Generator else (type(value), value)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that are tensors, including those in lists."""
    tensors = []
    for value in (*args, *kwargs.values()):
        values = value if isinstance(value, tuple | list) else (value,)
        tensors += [v for v in values if isinstance(v, Tensor)]
    return tensors


def _faked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return type(value)(map(_faked, value)) if isinstance(value, tuple | list) else value
