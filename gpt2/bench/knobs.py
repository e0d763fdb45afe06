"""``make bench-knobs``: what each setting that trades speed costs and gains; imports no torch.

One setting is changed at a time against the base, which is what ``.config`` says, as one training.
Every arm of a round is a process of its own, started as a worker is; the arms take turns, and only
figures of one round are compared.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.apart import train_apart
from gpt2.config import Config
from lib.binding import Value
from lib.console import say
from lib.errors import ConfigError, Problem, RunError
from lib.kconfig import Layer, Tree

BASE = "base"
FEWEST_ROUNDS = 3
_WHY = "to be measured"
_HALF: dict[str, Value] = {"PRECISION_WHY": _WHY}
_ROUNDED: dict[str, Value] = {"MATMUL_WHY": _WHY}
_AHEAD: dict[str, Value] = {"LOADER_WORKERS": 2}
# Each stands for one setting; reasons and what makes it available go with it.
CHANGES: Sequence[dict[str, Value]] = (
    {"PRECISION_FP32": True},
    {"PRECISION_BF16": True, **_HALF},
    {"PRECISION_FP16": True, **_HALF},
    {"MATMUL_PRECISION_HIGHEST": True},
    {"MATMUL_PRECISION_HIGH": True, **_ROUNDED},
    {"MATMUL_PRECISION_MEDIUM": True, **_ROUNDED},
    {"ATTENTION_BACKEND_AUTO": True},
    {"ATTENTION_BACKEND_FLASH": True},
    {"ATTENTION_BACKEND_EFFICIENT": True},
    {"ATTENTION_BACKEND_MATH": True},
    {"ATTENTION_BACKEND_ROWS": True},
    {"DETERMINISTIC_STRICT": True},
    {"DETERMINISTIC_WARN": True},
    {"DETERMINISTIC_OFF": True},
    {"CUDNN_BENCHMARK": True},
    {"COMPILE": True},
    {"GRAD_CHECKPOINTING": True},
    {"CPU_THREADS": 2},
    {"EXPANDABLE_SEGMENTS": True},
    {"PIN_MEMORY": False},
    _AHEAD,
    {**_AHEAD, "PREFETCH_FACTOR": 4},
    {**_AHEAD, "PERSISTENT_WORKERS": False},
)
# What looks for faults while it trains: nothing is timed with it.
_DEBUGGING = ("DETECT_ANOMALY",)


@dataclass(frozen=True)
class Arm:
    """The base, or one setting changed."""

    name: str
    config: Config


@dataclass(frozen=True)
class Figures:
    """One training of a few steps."""

    tokens_per_second: float
    # Of this process on a CPU, of all tensors on a GPU.
    peak_bytes: int
    # Of the last step, in nats.
    loss: float
    # SHA-256 of the weights in the end: whether the bits are those of the base.
    weights: str


# One more training of an arm. RunError with its name where it fails.
Train = Callable[[Arm], Figures]


def arms(tree: Tree, layers: Sequence[Layer], names: str = "") -> tuple[list[Arm], list[Problem]]:
    """The base and what can be changed on it, and why the rest cannot; ``names`` chooses symbols.

    ConfigError where the base looks for faults, or ``names`` names no setting.
    """
    # The bench compares; that a paper would not take an arm is no reason not to time it.
    single: dict[str, Value] = {"SINGLE_TRAINING": True, "RUN_PROFILE_MAXOUT_SPEED": True}
    # On by default for a paper, and no part of what is timed.
    single["CHECK_NUMERICS"] = False
    layers = [*layers, Layer.of("command line", "bench-knobs", single)]
    base = resolve_config(tree, layers)
    if debugging := [name for name in _DEBUGGING if base.values.get(name)]:
        raise ConfigError(*(_not_timed(name) for name in debugging))
    found, left_out = [Arm(BASE, base)], []
    for change in _chosen(names):
        name = _name(change)
        try:
            config = resolve_config(tree, [*layers, Layer.of("command line", name, change)])
        except ConfigError as error:
            left_out.append(Problem(f"{name}: {error.problems[0].what}"))
            continue
        if config.values != base.values:
            found.append(Arm(name, config))
    return found, left_out


def measure(every: Sequence[Arm], rounds: int, train: Train) -> dict[str, list[Figures]]:
    """The figures of each round of every arm that can be trained here, the arms in turn."""
    figures: dict[str, list[Figures]] = {arm.name: [] for arm in every}
    for count in range(rounds):
        for arm in every:
            if arm.name not in figures:
                continue
            try:
                figures[arm.name].append(train(arm))
            except RunError as error:
                if arm.name == BASE:
                    raise
                say("WARN", f"left out: {error}")
                del figures[arm.name]
                continue
            last = figures[arm.name][-1]
            say("BENCH", f"{count + 1}/{rounds}  {arm.name}  {last.tokens_per_second:,.0f} tok/s")
    return figures


def train_arm(arm: Arm, steps: int, build_dir: Path) -> Figures:
    """Train ``steps`` steps in a new process. RunError where it fails."""
    arguments = (str(steps), str(build_dir))
    return Figures(**train_apart(arm.name, arm.config, "gpt2.bench.arm", *arguments))


def to_markdown(figures: Mapping[str, Sequence[Figures]]) -> str:
    """A row for each arm: medians, and the range of what is compared within rounds."""
    heads = ("setting", "tok/s", "against base", "peak MiB", "loss", "bits")
    lines = [f"| {' | '.join(heads)} |", "|-|-:|-:|-:|-:|-|"]
    base = figures[BASE]
    for name, found in figures.items():
        speed = statistics.median(f.tokens_per_second for f in found)
        pairs = zip(found, base, strict=True)
        ratios = [own.tokens_per_second / other.tokens_per_second for own, other in pairs]
        peak = statistics.median(f.peak_bytes for f in found) / 2**20
        losses = dict.fromkeys(repr(f.loss) for f in found)
        cells = (
            name,
            f"{speed:,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{peak:,.0f}",
            ", ".join(losses),
            _bits(found, base),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bits(found: Iterable[Figures], base: Sequence[Figures]) -> str:
    own = {f.weights for f in found}
    if len(own) > 1:
        return "differ from round to round"
    return "as the base" if own == {f.weights for f in base} else "other"


def _chosen(names: str) -> list[dict[str, Value]]:
    """The changes of symbols or choices that ``names`` names; all without."""
    asked = names.replace(",", " ").split()
    chosen = [c for c in CHANGES if not asked or any(_is_of(c, name) for name in asked)]
    if lost := [name for name in asked if not any(_is_of(c, name) for c in CHANGES)]:
        known = ", ".join(dict.fromkeys(_name(change) for change in CHANGES))
        raise ConfigError(*(Problem(f"{n}: is none of {known}", "SYM") for n in lost))
    return chosen


def _is_of(change: Mapping[str, Value], name: str) -> bool:
    """Whether the last of the settings that are no reasons is ``name``, or a member of it."""
    symbol = _symbol(change)
    return symbol == name or symbol.startswith(f"{name}_")


def _symbol(change: Mapping[str, Value]) -> str:
    return [name for name in change if not name.endswith("_WHY")][-1]


def _name(change: Mapping[str, Value]) -> str:
    """``CPU_THREADS=2``; a name alone is y."""
    symbol = _symbol(change)
    value = change[symbol]
    if isinstance(value, bool):
        return symbol if value else f"{symbol}=n"
    return f"{symbol}={value}"


def _not_timed(name: str) -> Problem:
    what = f"{name}: y looks for faults while it trains, and is not to be timed"
    return Problem(what, next=f"type: make defconfig-NAME SET={name}=n")
