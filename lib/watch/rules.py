"""Alarm rules for unhealthy runs. A rule without data returns ""."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lib.units import clock
from lib.watch.facts import Facts
from lib.watch.options import WatchOptions

# The first log intervals contain compilation and allocator growth.
_WARMUP_BEATS = 2
_MIN_BEATS = 5

Rule = Callable[[Facts, WatchOptions], str]


def alarms(facts: Facts, options: WatchOptions) -> dict[str, str]:
    """Return rule name → alarm text; empty for a healthy run."""
    texts = {name: rule(facts, options) for name, rule in RULES.items()}
    return {name: text for name, text in texts.items() if text}


def stall(facts: Facts, options: WatchOptions) -> str:
    """Report ranks of a running run without a recent heartbeat."""
    if not facts.is_running:
        return ""
    silent = {
        rank: facts.now - beats[-1]["ts"] for rank, beats in facts.heartbeats.items() if beats
    }
    stalled = {rank: s for rank, s in silent.items() if s > options.stall_seconds}
    if not stalled:
        return ""
    ranks = ", ".join(map(str, stalled))
    return f"no heartbeat of rank {ranks} for {clock(max(stalled.values()))}"


def zero_throughput(facts: Facts, options: WatchOptions) -> str:
    """Report if the newest log interval processed no tokens."""
    speeds = _values(facts.beats, "toks_per_s")
    return "0 tokens per second" if speeds and speeds[-1] <= 0 else ""


def plateau(facts: Facts, options: WatchOptions) -> str:
    """Report if the mean training loss has stopped falling."""
    count = options.plateau_iterations
    losses = [row["loss"] for row in facts.train[-2 * count :]]
    if len(losses) < 2 * count:
        return ""
    before, after = fmean(losses[:count]), fmean(losses[count:])
    if after < before:
        return ""
    return f"mean loss {after:.4f} over the last {count} iterations, {before:.4f} before"


def throughput(facts: Facts, options: WatchOptions) -> str:
    """Report if the newest log interval of a running run was slower or faster than the median."""
    if not facts.is_running:
        return ""
    speeds = _values(facts.beats, "toks_per_s")[_WARMUP_BEATS:]
    if len(speeds) < _MIN_BEATS or speeds[-1] <= 0:
        return ""
    median_speed = median(speeds)
    percent = 100 * (speeds[-1] / median_speed - 1)
    if abs(percent) <= options.speed_percent:
        return ""
    return f"{speeds[-1]:,.0f} tok/s, {percent:+.0f} % from the median {median_speed:,.0f}"


def memory_creep(facts: Facts, options: WatchOptions) -> str:
    """Report if memory keeps growing after the start."""
    for rank, beats in facts.heartbeats.items():
        reserved = _values(beats, "mem_reserved_mib")
        quarter = len(reserved) // 4
        if quarter < _WARMUP_BEATS:
            continue
        before, after = median(reserved[quarter : 2 * quarter]), median(reserved[-quarter:])
        if after > before * (1 + options.memory_percent / 100):
            return f"rank {rank} reserves {after:,.0f} MiB, {before:,.0f} near the start"
    return ""


def zero_gradient(facts: Facts, options: WatchOptions) -> str:
    """Report if the newest step had a zero gradient."""
    norms = [row["grad_norm"] for row in facts.train[-1:]]
    return "the gradient is 0" if norms == [0.0] else ""


def fallbacks(facts: Facts, options: WatchOptions) -> str:
    """Report if the number of fallbacks to slower kernels has grown since the start."""
    counts = _values(facts.beats, "fallbacks")
    if len(counts) < 2 or counts[-1] <= counts[0]:
        return ""
    return f"{counts[-1]:.0f} fallbacks, {counts[0]:.0f} at the start"


def gate_entropy(facts: Facts, options: WatchOptions) -> str:
    """Report if gates over branches have collapsed."""
    entropies = _values(facts.beats, "gate_entropy")
    if not entropies or entropies[-1] >= options.gate_entropy:
        return ""
    return f"mean gate entropy {entropies[-1]:.3f} nats (below {options.gate_entropy:g})"


def gate_max(facts: Facts, options: WatchOptions) -> str:
    """Report if one branch dominates the gates."""
    maxima = _values(facts.beats, "gate_max")
    if not maxima or maxima[-1] <= options.gate_max:
        return ""
    return f"mean of the largest gate {maxima[-1]:.3f} (above {options.gate_max:g})"


RULES: Mapping[str, Rule] = {
    rule.__name__.replace("_", "-"): rule
    for rule in (
        stall,
        zero_throughput,
        plateau,
        throughput,
        memory_creep,
        zero_gradient,
        fallbacks,
        gate_entropy,
        gate_max,
    )
}


def _values(beats: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of ``name`` in the heartbeats that contain it."""
    return [beat[name] for beat in beats if beat.get(name) is not None]
