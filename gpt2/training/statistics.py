"""Mechanism statistics during training, without effect on its results.

Measured in a separate forward pass, without gradients and in evaluation mode, on the first training
sequences of the seed's order: the same text at every iteration and in every run of a study.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from gpt2.data.sampler import TrainSampler
from gpt2.mechanism_statistics import Layers, fallbacks_of, statistics_of
from gpt2.training.session import Session
from lib.machine.setup import autocast
from lib.telemetry.layers import known_values, over_layers


def fallbacks(session: Session) -> int:
    """Return the number of fallbacks: out-of-memory fallbacks and slow paths taken in the model."""
    return len(session.oom_fallbacks) + fallbacks_of(session.model)


def statistics_due(session: Session) -> bool:
    """Return whether statistics are due: at the end of an interval or of training, once each."""
    interval = session.config.telemetry.statistics_interval
    if not interval or session.iteration == session.told_at:
        return False
    return session.iteration % interval == 0 or session.progress >= 1.0


def tell_statistics(session: Session) -> None:
    """Append statistics to metrics.jsonl and the heartbeat, on rank 0 only."""
    session.told_at = session.iteration
    if not session.group.is_main:
        return
    try:
        values = _measure(session)
    except torch.OutOfMemoryError:
        rows = session.config.telemetry.statistics_rows
        what = f"no statistics at iteration {session.iteration}: out of memory"
        session.records.line("WARN", f"{what}; reduce STATISTICS_ROWS={rows}")
        return
    session.records.metrics(
        kind="statistics", iteration=session.iteration, tokens=session.tokens, values=values
    )
    session.heartbeat.beat(
        "statistics", session.iteration, statistics=over_layers(values), **_watched(values)
    )


def _measure(session: Session) -> Layers:
    model, training = session.model, session.model.training
    model.eval()
    gpus = [session.device] if session.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), autocast(session.config.machine):
            return statistics_of(model, _sequences(session))
    finally:
        model.train(training)


def _sequences(session: Session) -> Tensor:
    """Return the first STATISTICS_ROWS training sequences [B, T]."""
    length = session.config.model.shape.block_size
    sampler = TrainSampler(session.dataset.train, length, session.config.seed)
    windows = sampler.sequences(0, session.config.telemetry.statistics_rows)
    return torch.from_numpy(windows[:, :-1]).to(session.device)


def _watched(values: Layers) -> dict[str, Any]:
    """Return the inputs of the watch rules: gates over branches, of the worst layer."""
    entropies, largest = (_with_suffix(values, end) for end in ("/gate_entropy", "/gate_largest"))
    gates = {"gate_entropy": min(entropies)} if entropies else {}
    return gates | ({"gate_max": max(largest)} if largest else {})


def _with_suffix(values: Layers, suffix: str) -> list[float]:
    """Return the values of all mechanisms and layers whose name ends with ``suffix``."""
    matches = (known_values(layers) for name, layers in values.items() if name.endswith(suffix))
    return list(itertools.chain.from_iterable(matches))
