"""Two processes train as one does.

B batch, T tokens.
"""

import contextlib
import hashlib
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

# DistributedDataParallel loads it: here, and not in the second process alone.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.config import Config
from gpt2.model import GPT
from lib.machine.group import Group
from lib.machine.process import Process

_LENGTH = 17
_TOLERANCE = 1e-9
_PATIENCE = timedelta(seconds=10)
_RANKS = 2


def check(subject: Subject) -> list[Finding]:
    """Gradients of two halves of a batch, shared as training shares them, against the whole's.

    Each half comes in two micro-batches, of which only the last one is to send anything.
    """
    config, ids_BT = subject.exact, subject.tokens(2 * _RANKS, _LENGTH)
    meeting = subject.workshop.folder / "rendezvous"
    # Tensors would be sent as shared memory, which two related processes cannot hand over.
    rows = ids_BT.tolist()
    with contextlib.ExitStack() as failure:
        # In a group that one of them has left, the next step would fail too.
        failure.callback(subject.workshop.dismiss)
        partner = subject.workshop.partner
        partner.start("gpt2.check.parallel:train", 1, config, meeting, rows)
        digest, gradients = train(0, config, meeting, rows)
        other_digest, others = partner.result()
        failure.pop_all()
    found = []
    if digest != other_digest:
        found.append(Finding("the same initial weights on both ranks", "they differ"))
    unused = [name for name in gradients if gradients[name] is None or others[name] is None]
    found += [Finding(f"a gradient of {name} on both ranks", "none") for name in unused]
    for name, wanted in _single(config, ids_BT).items():
        if name not in unused and not (error := _error(gradients[name], wanted)) <= _TOLERANCE:
            text = f"differs by {error:.1e} of its size"
            found.append(Finding(f"the gradient of {name} as in one process", text))
    return found


def train(
    rank: int, config: Config, meeting: Path, rows: list[list[int]]
) -> tuple[str, dict[str, np.ndarray | None]]:
    """One rank: a digest of its initial weights, and the gradients after the reduction."""
    _meet(rank, meeting)
    model = _initialised(config)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    group = Group(Process(rank, _RANKS))
    shared = group.share_gradients(model)
    micro_batches = torch.tensor(rows[rank::_RANKS]).split(1)
    for i, ids_BT in enumerate(micro_batches, 1):
        with group.exchange(shared, now=i == len(micro_batches)):
            (shared(ids_BT[:, :-1], ids_BT[:, 1:]) / len(micro_batches)).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return digest.hexdigest(), {n: g if g is None else g.numpy() for n, g in gradients.items()}


def part() -> None:
    """Leave the group, if this process is in one; the next partner needs a new one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(rank: int, meeting: Path) -> None:
    """Join the partner, once for all steps."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=_RANKS, timeout=_PATIENCE
    )


def _single(config: Config, ids_BT: Tensor) -> dict[str, Tensor]:
    model = _initialised(config)
    model(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _initialised(config: Config) -> GPT:
    """As the trainer initialises it, in float64."""
    torch.set_num_threads(1)
    model = GPT(config.model)
    model.init_weights(config.seed)
    return model.double()


def _error(found: np.ndarray | None, wanted: Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert found is not None
    return float(np.abs(found - wanted.numpy()).max() / max(float(wanted.abs().max()), 1e-30))
