"""Random configurations that the Kconfig tree and all rules allow; imports no torch.

What a user can set is set with some probability, once what it depends on has been drawn. A broken
rule names its symbol first: that one is made to fit, drawn again, or the whole draw is rejected.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from kconfiglib import BOOL, INT, Choice, Symbol

from gpt2.check.readers import readers
from gpt2.config import Config, StudyConfig
from lib.binding import Value
from lib.errors import ConfigError
from lib.kconfig import Layer, Tree
from lib.tracking import TRACKERS

# Part of the symbols that a draw sets.
_SHARE = 0.6
# Part of the numbers that are an end of their range.
_EDGE = 0.1
_REPAIRS = 30
# Narrower than the legal bounds: beyond them nothing learns, as a check would rightly say, or the
# small form of the configuration, which keeps its proportions, is not small.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "LEARNING_RATE": (1e-4, 3e-3),
    "MIN_LEARNING_RATE": (0.0, 1e-3),
    "WEIGHT_DECAY": (0.0, 1.0),
    "GRAD_CLIP": (0.0, 10.0),
    "DROPOUT": (0.0, 0.5),
    "ADAM_BETA1": (0.0, 0.99),
    "ADAM_BETA2": (0.5, 0.9999),
    "ADAM_EPS": (1e-12, 1e-6),
    "SGD_MOMENTUM": (0.0, 0.99),
    # A strength of 0 is off.
    "RECIPROCAL_ALPHA": (0.05, 2.0),
    "RA_CROSS_TOKEN_ALPHA": (0.05, 1.0),
    "MLP_ATTN_GATE_ALPHA": (0.05, 1.0),
    "MLP_CROSS_TOKEN_ALPHA": (0.05, 2.0),
    "MLP_LATENT_ALPHA": (0.05, 2.0),
    # Above 1, nothing is kept of rows that are even, as all are at first.
    "MLP_CROSS_TOKEN_TAU": (0.0, 1.0),
    # A gate that is shut or wide open has no gradient that fp32 can add.
    "RA_CROSS_TOKEN_SCALE": (-3.0, 3.0),
    "RA_CROSS_TOKEN_BIAS": (-3.0, 3.0),
    "MLP_ATTN_GATE_BIAS": (-3.0, 3.0),
    # In the few iterations of the small form the ramp has to have steps, and the loss to fall.
    "PRUNING_SPARSITY": (0.05, 0.8),
    "PRUNING_WARMUP": (0.0, 0.4),
    "PRUNING_RAMP_END": (0.6, 1.0),
    # Less than this is held by no small width.
    "MLP_RATIO": (0.5, 20.0),
    "MLP_HIDDEN": (0, 8192),
    "MLP_ATTN_GATE_DIM": (1, 1024),
    "MLP_CROSS_TOKEN_DIM": (1, 1024),
    "LATENT_DIM": (0, 1024),
}
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")

# Symbol → text of the value, as a configuration file has it.
Settings = dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """A configuration, what was set for it, and how many draws were given up before."""

    number: int
    settings: Mapping[str, str]
    config: Config
    rejected: int


def draw(tree: Tree, seed: int, number: int) -> Drawn:
    """The draw ``number`` of ``seed``: always the same one on the same tree."""
    random = Random(f"{seed}/{number}")
    rejected = 0
    while True:
        settings = _settings(tree, random)
        for _ in range(_REPAIRS):
            try:
                return Drawn(number, settings, resolved(tree, settings), rejected)
            except ConfigError as error:
                settings = _repaired(tree, settings, error, random)
        rejected += 1


def resolved(tree: Tree, settings: Mapping[str, str]) -> Config:
    """The configuration of ``settings`` on the defaults. ConfigError where a rule is broken."""
    return Config.from_values(tree.resolve([Layer.of("defconfig", "random", settings)]).values)


def applicable(tree: Tree, settings: Mapping[str, str]) -> Settings:
    """What of ``settings`` a user could set; the tree is then at what they add up to."""
    # Dropped are unmet dependencies and nothing else, because every value is in range.
    layer, _ = tree.adapt(Layer.of("config", "random", settings))
    return {assignment.name: assignment.value for assignment in layer.assignments}


def _settings(tree: Tree, random: Random) -> Settings:
    """Values for symbols in the order in which they come to be available."""
    settings: Settings = {}
    seen: set[str] = set()
    applicable(tree, settings)
    while new := [item for item in _drawable(tree) if item.name not in seen]:
        for item in new:
            seen.add(item.name)
            if random.random() < _SHARE:
                settings |= _setting(item, random)
        settings = applicable(tree, settings)
    return settings


def _drawable(tree: Tree) -> list[Symbol | Choice]:
    """What a user could set now and a run could depend on; free text stays as it is."""
    return [item for item in tree.items() if item.visibility and _matters(item)]


def _matters(item: Symbol | Choice) -> bool:
    reader = readers().get(item.name)
    if reader is None:
        # Whoever watches a run does not change it.
        return item.name.lower() not in TRACKERS
    text = reader.kind is str and not isinstance(item, Choice)
    return reader.owner is not StudyConfig and not text


def _setting(item: Symbol | Choice, random: Random) -> Settings:
    """A legal value, by the name that is assigned."""
    if isinstance(item, Choice):
        return {random.choice([member.name for member in item.syms if member.visibility]): "y"}
    if item.orig_type is BOOL:
        return {item.name: random.choice("yn")}
    if item.orig_type is INT:
        least, most = _BOUNDS.get(item.name) or _range(item)
        return {item.name: str(_whole(int(least), int(most), random))}
    reader = readers()[item.name]
    low, high = _BOUNDS.get(item.name, (reader.low, reader.high))
    assert low is not None and high is not None, item.name
    return {item.name: f"{_real(low, high, random):.3g}"}


def _whole(low: int, high: int, random: Random) -> int:
    """Even on a logarithmic scale, and the ends more often."""
    if random.random() < _EDGE:
        return random.choice((low, high))
    return round(math.exp(random.uniform(math.log(max(low, 1)), math.log(high))))


def _real(low: float, high: float, random: Random) -> float:
    """Even, but on a logarithmic scale where the bounds are orders of magnitude apart."""
    if random.random() < _EDGE:
        return random.choice((low, high))
    if low > 0.0 and high / low > 100.0:
        return math.exp(random.uniform(math.log(low), math.log(high)))
    return random.uniform(low, high)


def _repaired(tree: Tree, settings: Settings, error: ConfigError, random: Random) -> Settings:
    """Other values for the symbols that the problems name."""
    settings = applicable(tree, settings)
    values = tree.resolve([Layer.of("defconfig", "random", settings)]).values
    for problem in error.problems:
        named = _NAME.match(problem.what)
        item = tree.find(named[0]) if named else None
        if item is None:
            continue
        if isinstance(item, Symbol) and item.choice:
            item = item.choice
        if isinstance(item, Choice):
            settings = {k: v for k, v in settings.items() if k not in {m.name for m in item.syms}}
        if item.visibility:
            settings |= _fitting(item, values) or _setting(item, random)
    return applicable(tree, settings)


def _fitting(item: Symbol | Choice, values: Mapping[str, Value]) -> Settings:
    """What a rule leaves no choice about; an end of the range where that lies outside."""
    if item.name not in ("GLOBAL_BATCH", "N_EMBD"):
        return {}
    low, high = _range(item)
    if item.name == "GLOBAL_BATCH":
        each = int(values["BATCH_SIZE"]) * int(values["GPUS"])
        passes = max(1, min(int(values["GRAD_ACCUMULATION"]), high // each))
        batch = min(high, each * passes)
        return {"GLOBAL_BATCH": str(batch), "GRAD_ACCUMULATION": str(passes)}
    heads = int(values["N_HEAD"])
    return {"N_EMBD": str(max(low, int(values["N_EMBD"]) // heads * heads, heads))}


def _range(item: Symbol) -> tuple[int, int]:
    """Both ends of a number's range."""
    low, high = item.ranges[0][:2]
    return int(low.str_value), int(high.str_value)
