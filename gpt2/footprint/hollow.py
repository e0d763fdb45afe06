"""Tensors with shape, type and storage but no memory of their own, and operations that only shape.

torch's fake tensors say what an operation returns; they are slow because every operation, a view
too, goes through Python several times. So they are asked once for every operation on every shape.
What they said is given to hollow CPU tensors, whose storages all lie on the same reserved and never
touched addresses. Autograd, autocast and views are torch's own.
"""

import mmap
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# Makes an output from the arguments that are tensors.
Maker = Callable[[list[Tensor]], Any]
# In the place of makers, for an operation that only looks at memory from another side.
_VIEW = "view"
# Linux: nothing is set aside for the pages. Python's mmap names this flag from 3.13 on.
_MAP_NORESERVE = 0x4000

_reserved = mmap.mmap(-1, mmap.PAGESIZE)
_answers: dict[Any, Any] = {}
_fake = FakeTensorMode()


def shape_only(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns, computing nothing. Raises what torch raises where shapes do not fit.

    Call it from ``__torch_dispatch__``, where autograd and autocast have done their part.
    """
    # Marks for a profiler, which optimizers set.
    if func.namespace == "profiler":
        return func(*args, **kwargs)
    key = func, *map(_key, args), *map(_key, kwargs.items())
    answer = _answers.get(key)
    if answer is None:
        answer = _answers[key] = _ask(func, args, kwargs)
    if answer is _VIEW:
        return func(*args, **kwargs)
    pack, makers = answer
    given = _tensors(args, kwargs)
    outputs = [make(given) for make in makers]
    return pack(outputs) if pack else outputs[0]


def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    """The answer of torch's fake tensors: how to pack the outputs, and a maker of each."""
    if func.is_view:
        return _VIEW
    with _fake:
        fake_args, fake_kwargs = _faked(args), {k: _faked(v) for k, v in kwargs.items()}
        out = func(*fake_args, **fake_kwargs)
    given = _tensors(fake_args, fake_kwargs)
    storages = {t.untyped_storage()._cdata for t in given}
    makers: list[Maker] = []
    for value in out if isinstance(out, tuple | list) else (out,):
        places = [i for i, tensor in enumerate(given) if tensor is value]
        if places:
            makers.append(itemgetter(places[0]))
        elif not isinstance(value, Tensor):
            makers.append(partial(_constant, value))
        elif value.untyped_storage()._cdata in storages:
            return _VIEW
        else:
            size = value.untyped_storage().nbytes()
            makers.append(partial(_new, value.shape, value.stride(), value.dtype, size))
    return type(out) if isinstance(out, tuple | list) else None, makers


def _constant(value: Any, given: list[Tensor]) -> Any:
    return value


def _new(shape: Any, strides: Any, dtype: torch.dtype, size: int, given: list[Tensor]) -> Tensor:
    global _reserved
    if size == 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    if size > len(_reserved):
        # The old one stays for as long as a tensor lies on it.
        _reserved = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    flat = torch.frombuffer(_reserved, dtype=dtype, count=size // dtype.itemsize)
    return flat.as_strided(shape, strides)


def _key(value: Any) -> Any:
    """What of an argument decides the answer; 1, 1.0 and True are three things."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    # isinstance() of a Generator takes longer than all the rest.
    return Generator if type(value) is Generator else (type(value), value)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that are tensors, those in lists too."""
    found = []
    for value in (*args, *kwargs.values()):
        values = value if isinstance(value, tuple | list) else (value,)
        found += [v for v in values if isinstance(v, Tensor)]
    return found


def _faked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return type(value)(map(_faked, value)) if isinstance(value, tuple | list) else value
