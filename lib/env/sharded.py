"""Parameters sharded over the ranks of a run with FSDP2 (``torch.distributed.fsdp.fully_shard``).

Each rank stores a part of the rows of every parameter, gradient and moment, as torch's DTensor. Values
that depend on several elements need the functions below, which do nothing to plain tensors. ``whole``
and ``sum_over_shards`` communicate: every rank calls them in the same order.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def shard_parameters(model: M, blocks: Iterable[nn.Module], device: torch.device) -> M:
    """Shard the parameters of ``model`` in place, by block, and move them to ``device``.

    Returns a copy of the modules without weights, for ``whole_copy``. Parameters outside of the
    blocks stay gathered from the first forward to the end of the backward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    blank = copy.deepcopy(model, {id(p): _on_meta(p) for p in model.parameters()})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return blank


def whole_copy(blank: M, model: nn.Module) -> M:
    """Return a copy of ``blank`` with all weights of the sharded ``model`` on this rank."""
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    parameters = {
        id(p): nn.Parameter(weights[name], p.requires_grad) for name, p in blank.named_parameters()
    }
    return copy.deepcopy(blank, parameters)


def is_sharded(tensor: Tensor) -> bool:
    if not dist.is_initialized():
        # Importing DTensor takes most of a second.
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all rows of a sharded tensor on its device, or ``tensor`` if it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def whole_state(value: Any, kept: bool) -> Any:
    """Return nested values with sharded tensors gathered on the CPU, or, unless ``kept``, emptied."""
    if isinstance(value, Tensor):
        if not is_sharded(value):
            return value
        full = whole(value)
        return full.cpu() if kept else full.new_empty(0)
    if isinstance(value, Mapping):
        return {key: whole_state(item, kept) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole_state(item, kept) for item in value)
    return value


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, in its memory, or ``tensor`` if not sharded."""
    if not is_sharded(tensor):
        return tensor
    rows: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return rows


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor``, which is equal on all ranks, sharded as ``like`` is."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    return distribute_tensor(tensor.to(like.device), mesh, like.placements, src_data_rank=None)


def sum_over_shards(value: Tensor, like: Tensor) -> Tensor:
    """Return the sum over the ranks of ``value``, computed on local rows, if ``like`` is sharded."""
    if not is_sharded(like):
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
