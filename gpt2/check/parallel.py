"""Training on two ranks gives the gradients of training on one.

B batch, T tokens.
"""

import contextlib
import hashlib
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

# DistributedDataParallel imports it; import it here, so that both processes share it.
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
_TIMEOUT = timedelta(seconds=10)
_RANKS = 2


def check(subject: Subject) -> list[Finding]:
    """Compare gradients averaged over two half batches with the gradients of the whole batch.

    Each half consists of two micro-batches; only the last one synchronizes gradients.
    """
    config, ids_BT = subject.exact, subject.tokens(2 * _RANKS, _LENGTH)
    rendezvous = subject.workshop.folder / "rendezvous"
    # Lists, because tensors would be sent as shared memory, which a forked peer cannot open.
    rows = ids_BT.tolist()
    with contextlib.ExitStack() as failure:
        # After a failure, one process may have left the group, and the next step would fail too.
        failure.callback(subject.workshop.dismiss)
        partner = subject.workshop.partner
        partner.start("gpt2.check.parallel:train", 1, config, rendezvous, rows)
        digest, gradients = train(0, config, rendezvous, rows)
        peer_digest, peer_gradients = partner.result()
        failure.pop_all()
    findings = []
    if digest != peer_digest:
        findings.append(
            Finding("same-initial-weights", "the same initial weights on both ranks", "they differ")
        )
    unused = [name for name in gradients if gradients[name] is None or peer_gradients[name] is None]
    findings += [
        Finding("gradient-on-all-ranks", f"a gradient of {name} on both ranks", "none")
        for name in unused
    ]
    for name, expected in _single_process(config, ids_BT).items():
        if name not in unused and not (error := _error(gradients[name], expected)) <= _TOLERANCE:
            text = f"a relative error of {error:.1e}"
            what = f"the gradient of {name} as in one process"
            findings.append(Finding("same-gradient", what, text))
    return findings


def train(
    rank: int, config: Config, rendezvous: Path, rows: list[list[int]]
) -> tuple[str, dict[str, np.ndarray | None]]:
    """Run one rank.

    Returns a digest of the initial weights, and the gradients after the all-reduce.
    """
    _join_group(rank, rendezvous)
    model = _initialized(config)
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
    """Leave the process group, if any, so that the next partner can form a new one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, rendezvous: Path) -> None:
    """Join the partner's process group, once for all steps."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=_RANKS, timeout=_TIMEOUT
    )


def _single_process(config: Config, ids_BT: Tensor) -> dict[str, Tensor]:
    model = _initialized(config)
    model(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _initialized(config: Config) -> GPT:
    """Return the model with the trainer's initialization, in float64."""
    torch.set_num_threads(1)
    model = GPT(config.model)
    model.init_weights(config.seed)
    return model.double()


def _error(actual: np.ndarray | None, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    assert actual is not None
    return float(np.abs(actual - expected.numpy()).max() / max(float(expected.abs().max()), 1e-30))
