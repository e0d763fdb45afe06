"""Effect of changing one symbol alone, on a small base that makes the symbol available."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from kconfiglib import AND, BOOL, INT, Choice, Symbol, expr_items

from gpt2 import train
from gpt2.check.cases import CheckCase
from gpt2.check.context import CheckContext, ErrorCapture
from gpt2.check.distinct import Fingerprint, equal_fingerprints
from gpt2.check.fields import fields_by_symbol
from gpt2.check.random import Settings, applicable_settings, resolve_settings
from gpt2.check.shrink import small_config, with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.training.records import RecordWriter, StopCondition
from gpt2.training.setup import open_session, warm_up
from lib.config.field import SymbolValue
from lib.config.small_form import EffectBase
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.runs.run_dir import RunDir

# The profile that allows bf16 and TF32 without a reason.
_FAST = EffectBase({"RUN_PROFILE_MAXOUT_SPEED": "y"})
# Bases for settings of the run; the options of a mechanism declare their own.
_BASES: Mapping[str, EffectBase] = {
    "PRECISION": _FAST,
    "PRECISION_WHY": _FAST,
    "MATMUL_WHY": _FAST,
    "BLOCK_SIZE": EffectBase(small={"EVAL_TOKENS": 256}),
    "BUDGET": EffectBase(small={"MAX_TOKENS": 160, "GPT2_MAX_TIME": 1}),
    "MAX_TOKENS": EffectBase(small={"BUDGET": "tokens", "MAX_TOKENS": 320}),
    "MAX_FLOPS": EffectBase(small={"BUDGET": "flops", "MAX_FLOPS": "1e9"}),
}
# Changes of symbols that a rule ties to others, or whose values are lists.
_JOINT_CHANGES: Mapping[str, Mapping[str, SymbolValue]] = {
    "GLOBAL_BATCH": {"GLOBAL_BATCH": 4, "GRAD_ACCUMULATION": 2},
    "BATCH_SIZE": {"BATCH_SIZE": 1, "GRAD_ACCUMULATION": 2},
    "GRAD_ACCUMULATION": {"BATCH_SIZE": 1, "GRAD_ACCUMULATION": 2},
    # Twice the default of the small base.
    "MODEL_PARAMS": {"MODEL_PARAMS": 740_000},
    "LOADER_WORKERS": {"LOADER_WORKERS": 1, "PREFETCH_FACTOR": 2},
    # Empty if the device determines it.
    "PEAK_TFLOPS": {"PEAK_TFLOPS": "1.5"},
    # Lists of equal length.
    "VERDICT_LOOKS": {"VERDICT_LOOKS": "4,6,9"},
    "VERDICT_SPEND": {"VERDICT_SPEND": ".1,.2,.3"},
}


def check_effects(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each symbol and its problem, or ""; runs in a worker."""
    tree = KconfigTree()
    with CheckContext() as context:
        effects = EffectCache(context)
        for name in names:
            problem = None
            with ErrorCapture() as outcome:
                problem = check_symbol(tree, name, effects)
            if outcome.code:
                problem = Problem(outcome.text, code=outcome.code)
            yield name, str(problem) if problem else ""


class EffectCache:
    """Cache of the functions and training results of configurations."""

    def __init__(self, context: CheckContext) -> None:
        self._context = context
        self._fingerprints: dict[str, Fingerprint] = {}
        self._runs: dict[str, tuple[Any, ...]] = {}

    def differ(self, a: Config, b: Config) -> bool:
        """Return whether the functions or the training runs of two configurations differ."""
        return not equal_fingerprints(self._fingerprint(a), self._fingerprint(b)) or self._train(
            a
        ) != self._train(b)

    def _fingerprint(self, config: Config) -> Fingerprint:
        key = repr(sorted(config.values.items()))
        if key not in self._fingerprints:
            case = CheckCase("knobs", "knobs", "knobs", config)
            self._fingerprints[key] = _SmallStep(case, self._context).whole_fingerprint
        return self._fingerprints[key]

    def _train(self, config: Config) -> tuple[Any, ...]:
        """Train and evaluate. Return the steps, and the loss and token count of the evaluation."""
        key = repr(sorted(config.values.items()))
        if key not in self._runs:
            records = RecordWriter(RunDir(self._context.new_run_dir()), lambda event: None)
            session = open_session(config, self._context.prepare_data(config), records)
            warm_up(session)
            limit = config.run_time_limit_seconds
            train.train(session, StopCondition(lambda: False, limit, session.group.agree))
            evaluation = session.evaluate(session.state.model)
            assert evaluation is not None
            self._runs[key] = (session.state.iteration, evaluation.loss, evaluation.tokens)
            records.close()
        return self._runs[key]


class _SmallStep(StepUnderTest):
    """A step whose configuration is small already."""

    @cached_property
    def small_exact(self) -> Config:
        """Return the configuration without dropout and narrow types."""
        return with_changes(self.config, DROPOUT="0.0", PRECISION="fp32")


def settings_to_enable(tree: KconfigTree, item: Symbol | Choice) -> Settings:
    """Return a minimal set of settings with which a user could set ``item``.

    Raises ConfigError if there is none.
    """
    settings = _reveal(tree, item, {})
    if settings is None:
        what = f"{item.name}: no base configuration makes it available"
        raise ConfigError(Problem(what, code="symbol.unreachable"))
    return settings


def check_symbol(tree: KconfigTree, name: str, effects: EffectCache) -> Problem | None:
    """Return the problem of the symbol or choice ``name``, or None.

    A symbol passes if changing it has an effect exactly when it is declared to have one.
    """
    item = tree.find(name)
    assert item is not None
    reader = fields_by_symbol().get(name)
    acts = reader is None or reader.identity
    try:
        settings = settings_to_enable(tree, item) | dict(_effect_base(name).settings)
        base = with_changes(_small(resolve_settings(tree, settings)), **_effect_base(name).small)
        flips = list(_flips(tree, item, settings, base))
    except ConfigError as error:
        return error.problems[0]
    if not flips:
        return Problem("no other legal value on its base", code="symbol.single-value")
    changes = (effects.differ(base, flipped) for flipped in flips)
    if not acts:
        if not any(changes):
            return None
        what = "changes results (declared to have no effect on them)"
        return Problem(what, code="symbol.unexpected-effect")
    if not isinstance(item, Choice):
        return None if any(changes) else Problem("no effect", code="symbol.no-effect")
    same_as = base.values[name]
    idle = [str(f.values[name]) for f, differs in zip(flips, changes, strict=True) if not differs]
    if not idle:
        return None
    return Problem(f"no effect of {', '.join(idle)} instead of {same_as}", code="symbol.no-effect")


def _effect_base(name: str) -> EffectBase:
    reader = fields_by_symbol().get(name)
    return _BASES.get(name) or (reader and reader.effect) or EffectBase()


def _small(config: Config) -> Config:
    return small_config(config, DROPOUT="0.0", PRECISION="fp32")


def _flips(
    tree: KconfigTree, item: Symbol | Choice, settings: Settings, base: Config
) -> Iterator[Config]:
    """Yield the base with other legal values of ``item`` alone."""
    if item.name in _JOINT_CHANGES:
        yield with_changes(base, **_JOINT_CHANGES[item.name])
        return
    smalls = [_small(config) for config in _reconfigured(tree, item, settings)]
    other = [small for small in smalls if small.values[item.name] != base.values[item.name]]
    if other:
        yield from (with_changes(small, **_effect_base(item.name).small) for small in other)
        return
    for value in _other_values(item, base.values[item.name]):
        try:
            yield with_changes(base, **{item.name: value})
        except ConfigError:
            continue


def _reconfigured(tree: KconfigTree, item: Symbol | Choice, settings: Settings) -> Iterator[Config]:
    """Yield configurations resolved by Kconfig, for items that make other symbols available."""
    applicable_settings(tree, settings)
    if isinstance(item, Choice):
        names = [m.name for m in item.syms if m.visibility and m is not item.selection]
        changes = [{name: "y"} for name in names]
    elif item.orig_type is BOOL:
        changes = [{item.name: "n" if item.str_value == "y" else "y"}]
    else:
        changes = []
    for change in changes:
        try:
            yield resolve_settings(tree, applicable_settings(tree, settings | change))
        except ConfigError:
            continue


def _other_values(item: Symbol | Choice, value: SymbolValue) -> Iterator[SymbolValue]:
    """Yield other values: all of a choice or bool, near and distant ones of a number."""
    if isinstance(item, Choice):
        members = (m.name.removeprefix(f"{item.name}_").lower() for m in item.syms)
        yield from (member for member in members if member != value)
    elif item.orig_type is BOOL:
        yield not value
    elif item.orig_type is INT:
        number = int(value)
        low, high = (int(bound.str_value) for bound in item.ranges[0][:2])
        candidates = dict.fromkeys((2 * number, number + 1, number // 2, number - 1, low))
        yield from (n for n in candidates if low <= n <= high and n != number)
    elif fields_by_symbol()[item.name].kind is float:
        real, reader = float(value), fields_by_symbol()[item.name]
        reals = dict.fromkeys((real / 2, 2 * real, real + 0.5, reader.low, reader.high))
        yield from (str(x) for x in reals if x is not None and x != real)
    else:
        yield f"{value}x"


def _reveal(tree: KconfigTree, item: Symbol | Choice, settings: Settings) -> Settings | None:
    settings = applicable_settings(tree, settings)
    if item.visibility:
        return settings
    conditions = [node.prompt[1] for node in item.nodes if node.prompt] + [item.direct_dep]
    needed: set[Any] = set()
    for condition in conditions:
        needed |= {item for item in expr_items((AND, condition, condition)) if item.nodes}
    alternatives = [
        list(_changes(tree, operand, settings)) for operand in sorted(needed, key=_name)
    ]
    for combined in sorted(itertools.product(*alternatives), key=lambda c: sum(map(len, c))):
        trial = dict(settings)
        for change in combined:
            trial |= change
        trial = applicable_settings(tree, trial)
        if item.visibility:
            return trial
    return None


def _changes(tree: KconfigTree, operand: Symbol | Choice, settings: Settings) -> Iterator[Settings]:
    """Yield ways to change an operand of a condition; the first leaves it unchanged."""
    yield {}
    if isinstance(operand, Choice):
        yield _reveal(tree, operand, settings) or {}
        return
    before = applicable_settings(tree, settings)
    if operand.orig_type is INT and operand.visibility:
        yield {operand.name: str(int(operand.str_value) + 1)}
    if operand.orig_type is not BOOL:
        return
    if operand.str_value == "y" and operand.choice:
        yield from ({m.name: "y"} for m in operand.choice.syms if m is not operand)
    elif operand.str_value == "y":
        yield {operand.name: "n"}
    elif (revealed := _reveal(tree, operand, before)) is not None:
        yield revealed | {operand.name: "y"}


def _name(item: Symbol | Choice) -> str:
    return str(item.name)
