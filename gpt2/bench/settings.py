"""``make bench-settings``: the effect of each speed-related setting. Imports no torch.

One setting at a time is changed from the base, the configuration in ``.config`` as a single
training. Every arm of a round trains in a separate process, started like a worker. The arms take
turns, and only figures of the same round are compared.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.trainer import train_in_subprocess
from gpt2.config import Config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import ConfigError, Problem, RunError

BASE = "base"
MIN_ROUNDS = 3
_REASON = "benchmark"
_HALF: dict[str, SymbolValue] = {"PRECISION_WHY": _REASON}
_ROUNDED: dict[str, SymbolValue] = {"MATMUL_WHY": _REASON}
_AHEAD: dict[str, SymbolValue] = {"LOADER_WORKERS": 2}
# One setting per entry, together with the required reasons and the symbols that it depends on.
CHANGES: Sequence[dict[str, SymbolValue]] = (
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
# Debugging symbols that distort timings.
_DEBUG_SYMBOLS = ("DETECT_ANOMALY",)


@dataclass(frozen=True)
class BenchVariant:
    """Benchmark variant: the base, or the base with one changed setting."""

    name: str
    config: Config


@dataclass(frozen=True)
class SettingFigures:
    """Figures of one training of a few steps."""

    tokens_per_second: float
    # Peak memory of the process on a CPU, of all tensors on a GPU.
    peak_bytes: int
    # Loss of the last step, in nats.
    loss: float
    # SHA-256 of the final weights, which shows whether the result is bit-identical to the base.
    weights: str


# Function that trains an arm once. Raises RunError with the arm's name if the training fails.
TrainVariant = Callable[[BenchVariant], SettingFigures]


def variants(
    tree: KconfigTree, layers: Sequence[ConfigLayer], names: str = ""
) -> tuple[list[BenchVariant], list[Problem]]:
    """Return the base with all applicable variants, and the problems of the inapplicable ones.

    ``names`` restricts the symbols. Raises ConfigError if the base enables a debugging symbol or if
    ``names`` contains an unknown setting.
    """
    # The speed profile permits settings that the paper profile refuses.
    single: dict[str, SymbolValue] = {"SINGLE_TRAINING": True, "RUN_PROFILE_MAXOUT_SPEED": True}
    # Enabled by default for a paper, and not to be timed.
    single["CHECK_NUMERICS"] = False
    layers = [*layers, ConfigLayer.of("command line", "bench-settings", single)]
    base = resolve_config(tree, layers)
    if enabled := [name for name in _DEBUG_SYMBOLS if base.values.get(name)]:
        raise ConfigError(*(_debug_problem(name) for name in enabled))
    variants, left_out = [BenchVariant(BASE, base)], list[Problem]()
    for change in _chosen(names):
        name = _name(change)
        try:
            config = resolve_config(tree, [*layers, ConfigLayer.of("command line", name, change)])
        except ConfigError as error:
            first = error.problems[0]
            left_out.append(replace(first, what=f"{name}: {first.what}", where="", next=""))
            continue
        if config.values != base.values:
            variants.append(BenchVariant(name, config))
    return variants, left_out


def measure(
    every: Sequence[BenchVariant], rounds: int, train: TrainVariant
) -> dict[str, list[SettingFigures]]:
    """Train the arms in turn and return the figures of each round by arm.

    An arm that fails is left out with a warning. Raises RunError if the base fails.
    """
    figures: dict[str, list[SettingFigures]] = {arm.name: [] for arm in every}
    for count in range(rounds):
        for arm in every:
            if arm.name not in figures:
                continue
            try:
                figures[arm.name].append(train(arm))
            except RunError as error:
                if arm.name == BASE:
                    raise
                log("WARN", f"left out: {error}")
                del figures[arm.name]
                continue
            last = figures[arm.name][-1]
            log("BENCH", f"{count + 1}/{rounds}  {arm.name}  {last.tokens_per_second:,.0f} tok/s")
    return figures


def train_variant(arm: BenchVariant, steps: int, build_dir: Path) -> SettingFigures:
    """Train ``steps`` steps in a new process. Raises RunError if the process fails."""
    arguments = (str(steps), str(build_dir))
    return SettingFigures(
        **train_in_subprocess(arm.name, arm.config, "gpt2.bench.settings_worker", *arguments)
    )


def to_markdown(figures: Mapping[str, Sequence[SettingFigures]]) -> str:
    """Return a Markdown table with the medians and ratio ranges of every arm."""
    heads = ("setting", "tok/s", "against base", "peak MiB", "loss", "bits")
    lines = [f"| {' | '.join(heads)} |", "|-|-:|-:|-:|-:|-|"]
    base = figures[BASE]
    for name, rounds in figures.items():
        speed = statistics.median(f.tokens_per_second for f in rounds)
        pairs = zip(rounds, base, strict=True)
        ratios = [variant.tokens_per_second / other.tokens_per_second for variant, other in pairs]
        peak = statistics.median(f.peak_bytes for f in rounds) / 2**20
        losses = dict.fromkeys(repr(f.loss) for f in rounds)
        cells = (
            name,
            f"{speed:,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{peak:,.0f}",
            ", ".join(losses),
            _bits(rounds, base),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bits(rounds: Iterable[SettingFigures], base: Sequence[SettingFigures]) -> str:
    digests = {f.weights for f in rounds}
    if len(digests) > 1:
        return "vary between rounds"
    return "as the base" if digests == {f.weights for f in base} else "other"


def _chosen(names: str) -> list[dict[str, SymbolValue]]:
    """Return the changes of the symbols or choices in ``names``, or all changes if it is empty."""
    selected = names.replace(",", " ").split()
    changes = [c for c in CHANGES if not selected or any(_is_of(c, name) for name in selected)]
    if unknown := [name for name in selected if not any(_is_of(c, name) for c in CHANGES)]:
        settings = ", ".join(dict.fromkeys(_name(change) for change in CHANGES))
        code = "config.unknown-symbol"
        raise ConfigError(
            *(
                Problem(f"{name}: unknown setting (expected one of {settings})", "SYM", code=code)
                for name in unknown
            )
        )
    return changes


def _is_of(change: Mapping[str, SymbolValue], name: str) -> bool:
    """Return whether the changed symbol is ``name`` or a member of the choice ``name``."""
    symbol = _symbol(change)
    return symbol == name or symbol.startswith(f"{name}_")


def _symbol(change: Mapping[str, SymbolValue]) -> str:
    return [name for name in change if not name.endswith("_WHY")][-1]


def _name(change: Mapping[str, SymbolValue]) -> str:
    """Return the name of a variant, such as ``CPU_THREADS=2``; y is omitted."""
    symbol = _symbol(change)
    value = change[symbol]
    if isinstance(value, bool):
        return symbol if value else f"{symbol}=n"
    return f"{symbol}={value}"


def _debug_problem(name: str) -> Problem:
    what = f"{name}: debugging distorts timings (expected n, got y)"
    return Problem(what, next=f"type: make defconfig-NAME SET={name}=n", code="config.conflict")
