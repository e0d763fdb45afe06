"""Signs that a run is not well. A rule that has nothing to look at says nothing."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lib.units import clock
from lib.watch.facts import Facts
from lib.watch.options import WatchOptions

# The first log intervals hold compilation and the allocator's growth.
_STARTING_BEATS = 2
_LEAST_BEATS = 5

Rule = Callable[[Facts, WatchOptions], str]


def alarms(facts: Facts, options: WatchOptions) -> dict[str, str]:
    """Name of the rule → what it has to say; empty for a run that is well."""
    found = {name: rule(facts, options) for name, rule in RULES.items()}
    return {name: said for name, said in found.items() if said}


def stall(facts: Facts, options: WatchOptions) -> str:
    """A process of a running run has been silent for too long."""
    if not facts.is_running:
        return ""
    silent = {
        rank: facts.now - beats[-1]["ts"] for rank, beats in facts.heartbeats.items() if beats
    }
    late = {rank: s for rank, s in silent.items() if s > options.stall_seconds}
    if not late:
        return ""
    ranks = ", ".join(map(str, late))
    return f"no heartbeat of rank {ranks} for {clock(max(late.values()))}"


def zero_throughput(facts: Facts, options: WatchOptions) -> str:
    """The newest log interval made no tokens."""
    speeds = _values(facts.beats, "toks_per_s")
    return "0 tokens per second" if speeds and speeds[-1] <= 0 else ""


def plateau(facts: Facts, options: WatchOptions) -> str:
    """The training loss is no lower than it was."""
    count = options.plateau_iterations
    losses = [row["loss"] for row in facts.train[-2 * count :]]
    if len(losses) < 2 * count:
        return ""
    before, after = fmean(losses[:count]), fmean(losses[count:])
    if after < before:
        return ""
    return f"mean loss of the last {count} iterations {after:.4f}, of those before {before:.4f}"


def throughput(facts: Facts, options: WatchOptions) -> str:
    """The newest log interval of a running run was slower or faster than usual."""
    if not facts.is_running:
        return ""
    speeds = _values(facts.beats, "toks_per_s")[_STARTING_BEATS:]
    if len(speeds) < _LEAST_BEATS or speeds[-1] <= 0:
        return ""
    usual = median(speeds)
    percent = 100 * (speeds[-1] / usual - 1)
    if abs(percent) <= options.speed_percent:
        return ""
    return f"{speeds[-1]:,.0f} tok/s, {percent:+.0f} % against the median {usual:,.0f}"


def memory_creep(facts: Facts, options: WatchOptions) -> str:
    """Memory goes on growing after the start."""
    for rank, beats in facts.heartbeats.items():
        held = _values(beats, "mem_reserved_mib")
        quarter = len(held) // 4
        if quarter < _STARTING_BEATS:
            continue
        before, after = median(held[quarter : 2 * quarter]), median(held[-quarter:])
        if after > before * (1 + options.memory_percent / 100):
            return f"rank {rank} holds {after:,.0f} MiB, {before:,.0f} near its start"
    return ""


def zero_gradient(facts: Facts, options: WatchOptions) -> str:
    """The newest step had no gradient."""
    norms = [row["grad_norm"] for row in facts.train[-1:]]
    return "the gradient is 0" if norms == [0.0] else ""


def fallbacks(facts: Facts, options: WatchOptions) -> str:
    """A slower way was taken in place of the one that was asked for, and more often now."""
    counts = _values(facts.beats, "fallbacks")
    if len(counts) < 2 or counts[-1] <= counts[0]:
        return ""
    return f"{counts[-1]:.0f} fallbacks, {counts[0]:.0f} at the start"


def gate_entropy(facts: Facts, options: WatchOptions) -> str:
    """Gates over branches have lost their spread."""
    found = _values(facts.beats, "gate_entropy")
    if not found or found[-1] >= options.gate_entropy:
        return ""
    return f"mean gate entropy {found[-1]:.3f} nats, less than {options.gate_entropy:g}"


def gate_max(facts: Facts, options: WatchOptions) -> str:
    """One branch gets nearly all."""
    found = _values(facts.beats, "gate_max")
    if not found or found[-1] <= options.gate_max:
        return ""
    return f"mean of the largest gate {found[-1]:.3f}, more than {options.gate_max:g}"


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
    """What the heartbeats say of ``name``, where they say anything."""
    return [beat[name] for beat in beats if beat.get(name) is not None]
