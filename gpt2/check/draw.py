"""Random configurations that satisfy the Kconfig tree and all rules; imports no torch.

Each symbol is set with some probability once its dependencies are drawn. A violated rule starts its
message with a symbol: that symbol is derived or drawn again, or the whole draw is rejected.
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

# Probability that an available symbol is set.
_SET_PROBABILITY = 0.6
# Probability that a number is an end of its range.
_EDGE_PROBABILITY = 0.1
_MAX_REPAIRS = 30
# Narrower than the legal bounds. Beyond these, training does not learn and checks rightly fail, or the
# small form, which keeps the configuration's proportions, is not small.
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
    # A strength of 0 turns the mechanism off.
    "RECIPROCAL_ALPHA": (0.05, 2.0),
    "RA_CROSS_TOKEN_ALPHA": (0.05, 1.0),
    "MLP_ATTN_GATE_ALPHA": (0.05, 1.0),
    "MLP_CROSS_TOKEN_ALPHA": (0.05, 2.0),
    "MLP_LATENT_ALPHA": (0.05, 2.0),
    # Above 1, no weight of a uniform row remains, and all rows are nearly uniform at first.
    "MLP_CROSS_TOKEN_TAU": (0.0, 1.0),
    # The gradient of a saturated gate is below fp32 resolution.
    "RA_CROSS_TOKEN_SCALE": (-3.0, 3.0),
    "RA_CROSS_TOKEN_BIAS": (-3.0, 3.0),
    "MLP_ATTN_GATE_BIAS": (-3.0, 3.0),
    # Within the few iterations of the small form the ramp needs steps, and the loss has to fall.
    "PRUNING_SPARSITY": (0.05, 0.8),
    "PRUNING_WARMUP": (0.0, 0.4),
    "PRUNING_RAMP_END": (0.6, 1.0),
    # No small width allows less than this.
    "MLP_RATIO": (0.5, 20.0),
    "MLP_HIDDEN": (0, 8192),
    "MLP_ATTN_GATE_DIM": (1, 1024),
    "MLP_CROSS_TOKEN_DIM": (1, 1024),
    "LATENT_DIM": (0, 1024),
}
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")

# Symbol → text of the value, as in a configuration file.
Settings = dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """A random configuration, its settings, and the number of draws rejected before it."""

    number: int
    settings: Mapping[str, str]
    config: Config
    rejected: int


def draw(tree: Tree, seed: int, number: int) -> Drawn:
    """Return draw ``number`` of ``seed``, which is deterministic for a given tree."""
    random = Random(f"{seed}/{number}")
    rejected = 0
    while True:
        settings = _random_settings(tree, random)
        for _ in range(_MAX_REPAIRS):
            try:
                return Drawn(number, settings, resolved(tree, settings), rejected)
            except ConfigError as error:
                settings = _redraw_failing(tree, settings, error, random)
        rejected += 1


def resolved(tree: Tree, settings: Mapping[str, str]) -> Config:
    """Return the configuration of ``settings`` on top of the defaults.

    Raises ConfigError if a rule is violated.
    """
    return Config.from_values(tree.resolve([Layer.of("defconfig", "random", settings)]).values)


def applicable(tree: Tree, settings: Mapping[str, str]) -> Settings:
    """Return the subset of ``settings`` that a user could set.

    Afterwards the tree is in the state that these settings produce.
    """
    # Only unmet dependencies are dropped, because every value is in range.
    layer, _ = tree.adapt(Layer.of("config", "random", settings))
    return {assignment.name: assignment.value for assignment in layer.assignments}


def _random_settings(tree: Tree, random: Random) -> Settings:
    """Draw values for symbols in the order in which they become available."""
    settings: Settings = {}
    seen: set[str] = set()
    applicable(tree, settings)
    while items := [item for item in _drawable_items(tree) if item.name not in seen]:
        for item in items:
            seen.add(item.name)
            if random.random() < _SET_PROBABILITY:
                settings |= _random_setting(item, random)
        settings = applicable(tree, settings)
    return settings


def _drawable_items(tree: Tree) -> list[Symbol | Choice]:
    """Return the visible items that affect a run; free text keeps its default."""
    return [item for item in tree.items() if item.visibility and _affects_run(item)]


def _affects_run(item: Symbol | Choice) -> bool:
    reader = readers().get(item.name)
    if reader is None:
        # A tracker does not change the run.
        return item.name.lower() not in TRACKERS
    is_text = reader.kind is str and not isinstance(item, Choice)
    return reader.owner is not StudyConfig and not is_text


def _random_setting(item: Symbol | Choice, random: Random) -> Settings:
    """Draw a legal value; the key is the name that is assigned."""
    if isinstance(item, Choice):
        return {random.choice([member.name for member in item.syms if member.visibility]): "y"}
    if item.orig_type is BOOL:
        return {item.name: random.choice("yn")}
    if item.orig_type is INT:
        low, high = _BOUNDS.get(item.name) or _range(item)
        return {item.name: str(_random_integer(int(low), int(high), random))}
    reader = readers()[item.name]
    low, high = _BOUNDS.get(item.name, (reader.low, reader.high))
    assert low is not None and high is not None, item.name
    return {item.name: f"{_random_float(low, high, random):.3g}"}


def _random_integer(low: int, high: int, random: Random) -> int:
    """Draw from a log-uniform distribution, with extra weight on the ends."""
    if random.random() < _EDGE_PROBABILITY:
        return random.choice((low, high))
    return round(math.exp(random.uniform(math.log(max(low, 1)), math.log(high))))


def _random_float(low: float, high: float, random: Random) -> float:
    """Draw from a uniform distribution, with extra weight on the ends.

    The distribution is log-uniform if the bounds differ by more than two orders of magnitude.
    """
    if random.random() < _EDGE_PROBABILITY:
        return random.choice((low, high))
    if low > 0.0 and high / low > 100.0:
        return math.exp(random.uniform(math.log(low), math.log(high)))
    return random.uniform(low, high)


def _redraw_failing(tree: Tree, settings: Settings, error: ConfigError, random: Random) -> Settings:
    """Draw other values for the symbols named by the problems."""
    settings = applicable(tree, settings)
    values = tree.resolve([Layer.of("defconfig", "random", settings)]).values
    for problem in error.problems:
        match = _NAME.match(problem.what)
        item = tree.find(match[0]) if match else None
        if item is None:
            continue
        if isinstance(item, Symbol) and item.choice:
            item = item.choice
        if isinstance(item, Choice):
            settings = {k: v for k, v in settings.items() if k not in {m.name for m in item.syms}}
        if item.visibility:
            settings |= _derived_setting(item, values) or _random_setting(item, random)
    return applicable(tree, settings)


def _derived_setting(item: Symbol | Choice, values: Mapping[str, Value]) -> Settings:
    """Return the value that a rule determines, clamped to the symbol's range."""
    if item.name not in ("GLOBAL_BATCH", "N_EMBD"):
        return {}
    low, high = _range(item)
    if item.name == "GLOBAL_BATCH":
        per_pass = int(values["BATCH_SIZE"]) * int(values["GPUS"])
        passes = max(1, min(int(values["GRAD_ACCUMULATION"]), high // per_pass))
        batch = min(high, per_pass * passes)
        return {"GLOBAL_BATCH": str(batch), "GRAD_ACCUMULATION": str(passes)}
    heads = int(values["N_HEAD"])
    return {"N_EMBD": str(max(low, int(values["N_EMBD"]) // heads * heads, heads))}


def _range(item: Symbol) -> tuple[int, int]:
    """Return both ends of an integer symbol's range."""
    low, high = item.ranges[0][:2]
    return int(low.str_value), int(high.str_value)
