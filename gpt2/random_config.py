"""The ``make randconfig`` command: a random configuration that a CPU checks and trains in minutes.

Every setting of a run is drawn once its dependencies are. A violated rule starts its message with a
symbol, which is drawn again. If rules remain violated, it gets its default; if some still do, so do
all symbols that they name, and the symbols that these depend on.
"""

import math
import re
from collections.abc import Callable, Mapping
from random import Random

from kconfiglib import BOOL, INT, Choice, Symbol, expr_items

from gpt2.check.fields import fields_by_symbol
from gpt2.config import StudyConfig
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree, value_text
from lib.env.options import EnvironmentConfig
from lib.errors import ConfigError, Problem
from lib.runner.slurm import SlurmOptions
from lib.tracking.options import TRACKERS

# What is not drawn: the machine, the text, limits that would end a run, an evaluation of at least one
# window.
_FIXED = {"DEVICE_CPU": "y", "TOKENIZER_BYTE": "y", "MODEL_SIZE_CUSTOM": "y", "EVAL_TOKENS": "4096"}
_KEPT = {"DEVICE", "TOKENIZER", "MODEL_SIZE", "DATASET", "DATASET_STAND_IN", "GPUS", "COMPILE"}
_KEPT |= {"LEASE_SECONDS", "STALL_LIMIT_SECONDS", "EVAL_TOKENS", "ATTENTION_BACKEND"}
_KEPT |= {"EVAL_DOCUMENTS"}
_KEPT_CLASSES = (StudyConfig, EnvironmentConfig, SlurmOptions)
# Adapters need trained weights to be trained, and none to be checked.
_BASE = "run:NAME"
# Values near which numbers are drawn, if the default is too large for minutes on a CPU, or is 0.
_SMALL_TEXT = """
    N_LAYER=3 N_HEAD=4 N_EMBD=96 MLP_HIDDEN=256 LATENT_DIM=32 BLOCK_SIZE=64
    BATCH_SIZE=4 GRAD_ACCUMULATION=2 GLOBAL_BATCH=8 WARMUP_STEPS=10
    MAX_ITERS=50 MAX_TOKENS=20000 MAX_FLOPS=1e11 GPT2_MAX_TIME=20
    EVAL_INTERVAL=20 CHECKPOINT_INTERVAL=20
    LOG_INTERVAL=5 STATISTICS_INTERVAL=20 SAMPLE_TOKENS=16
"""
_SMALL = dict(setting.split("=") for setting in _SMALL_TEXT.split())
# Rounds in which the first symbol of a problem is drawn again, in which it gets its default, and in
# which all symbols of a problem do.
_ROUNDS = 20
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")

# Symbol → text of the value, as in a configuration file.
Settings = dict[str, str]
Rules = Callable[[Mapping[str, SymbolValue]], object]


def random_settings(tree: KconfigTree, rules: Rules, seed: int) -> Settings:
    """Return settings on top of the defaults that satisfy the tree and ``rules``.

    Raises ConfigError if no settings were found that satisfy every rule.
    """
    random = Random(seed)
    settings = _drawn(tree, random)
    for trial in range(3 * _ROUNDS):
        try:
            tree.checked([_layer(settings)], rules)
            return settings
        except ConfigError as error:
            problems = error.problems
        _applicable(tree, settings)
        for problem in problems:
            names = _NAME.findall(problem.what)[: None if trial >= 2 * _ROUNDS else 1]
            if trial >= 2 * _ROUNDS:
                items = filter(None, map(tree.find, names))
                names += [i.name for item in items for i in expr_items(item.direct_dep)]
            for name in names:
                settings = _changed(tree, settings, name, random if trial < _ROUNDS else None)
        settings = _applicable(tree, settings)
    what = f"no valid configuration in {3 * _ROUNDS} trials; the last: {problems[0].what}"
    advice = "type: make randconfig, without SEED= or with another one"
    raise ConfigError(Problem(what, f"SEED={seed}", advice, code="config.unsatisfied"))


def _layer(settings: Settings) -> ConfigLayer:
    return ConfigLayer.of("config", "randconfig", settings)


def _applicable(tree: KconfigTree, settings: Settings) -> Settings:
    """Return the settings without unmet dependencies; they are the state of the tree afterwards."""
    others = {name: value for name, value in settings.items() if name != "INIT_FROM"}
    base = {"INIT_FROM": _BASE} if settings.get("LORA") == "y" else {}
    return {a.name: a.value for a in tree.adapt(_layer(others | base))[0].assignments}


def _drawn(tree: KconfigTree, random: Random) -> Settings:
    """Draw a value of each symbol that is or becomes available, choices first."""
    settings, seen = _applicable(tree, _FIXED), set(_KEPT)
    while items := [i for i in tree.items() if i.visibility and i.name not in seen]:
        # One choice may make another one, or its members, unavailable.
        items = [item for item in items if isinstance(item, Choice)][:1] or items
        seen |= {item.name for item in items}
        for item in items:
            settings |= _value(item, random)
        settings = _applicable(tree, settings)
    return settings


def _changed(tree: KconfigTree, settings: Settings, name: str, random: Random | None) -> Settings:
    """Return ``settings`` with another value of the symbol or choice; the default without ``random``."""
    item = tree.find(name)
    if item is None or name in _KEPT | _FIXED.keys():
        return settings
    item = item.choice or item if isinstance(item, Symbol) else item
    names = {s.name for s in item.syms} if isinstance(item, Choice) else {item.name}
    others = {key: value for key, value in settings.items() if key not in names}
    if random and item.visibility:
        return others | _value(item, random)
    return others | ({name: _SMALL[name]} if name in _SMALL and item.visibility else {})


def _value(item: Symbol | Choice, random: Random) -> Settings:
    """Draw a legal value; the key is the name that is assigned. Text and kept classes: nothing."""
    reader = fields_by_symbol().get(item.name)
    if item.name.lower() in TRACKERS or (reader and reader.owner in _KEPT_CLASSES):
        return {}
    if isinstance(item, Choice):
        return {random.choice([member.name for member in item.syms if member.visibility]): "y"}
    if item.orig_type is BOOL:
        return {item.name: random.choice("yn")}
    near = _SMALL.get(item.name) or value_text(item)
    if item.orig_type is INT:
        low, high = (int(bound.str_value) for bound in item.ranges[0][:2])
        return {item.name: str(_whole_number(int(near), low, high, random))}
    if reader is None or reader.kind is not float:
        return {}
    bounds = -math.inf if reader.low is None else reader.low, reader.high or math.inf
    return {item.name: f"{_real_number(float(near), *bounds, random):.3g}"}


def _whole_number(near: int, low: int, high: int, random: Random) -> int:
    """Draw between the low end and twice ``near``, uniformly on a logarithmic scale.

    0 stays: it selects a default, or disables a feature.
    """
    least, most = max(low, 1), min(high, 2 * near)
    return round(math.exp(random.uniform(math.log(least), math.log(most)))) if near else 0


def _real_number(near: float, low: float, high: float, random: Random) -> float:
    """Draw between half and twice ``near``, or up to 0.5 from 0, which a model still learns with."""
    least, most = sorted((near / 2, 2 * near)) if near else (0.0, 0.5)
    return random.uniform(max(low, least), min(high, most))
