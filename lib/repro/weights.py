"""Digests of model weights and of arbitrary nested state."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the hexadecimal SHA-256 of names and bytes, sorted by name, for any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_digest(state: Any) -> str:
    """Return the hexadecimal SHA-256 of nested mappings and sequences of tensors, numbers and
    strings.

    Types, shapes and every bit count; the key order of mappings and the device do not.
    """
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add ``value`` to ``digest``, delimited by its length or a terminator."""
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        # A 0-d tensor cannot be viewed as bytes, a 1-d tensor can.
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    else:
        assert value is None or isinstance(value, bool | int | float | str), type(value)
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
