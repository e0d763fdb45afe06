"""One symbol, changed alone on a small base that makes it available, and what comes of it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kconfiglib import AND, BOOL, INT, Choice, Symbol, expr_items

from gpt2 import train
from gpt2.check.cases import Case
from gpt2.check.distinct import Fingerprint, fingerprint, same
from gpt2.check.draw import Settings, applicable, resolved
from gpt2.check.partner import Outcome
from gpt2.check.readers import readers
from gpt2.check.shrink import changed, shrink
from gpt2.check.subject import Subject
from gpt2.check.workshop import Workshop
from gpt2.config import Config
from gpt2.training.records import Records
from gpt2.training.start import open_session, warm_up
from gpt2.training.stopping import Stop
from lib.binding import Value
from lib.errors import ConfigError
from lib.kconfig import Tree
from lib.rundir import RunDir

# Gradient norms that go up now and then, and a small rise that counts as a spike.
_SPIKES = {"SPAM_SPIKE_THRESHOLD": "0.0", "SPAM_SPIKE_WINDOW": "2", "LEARNING_RATE": "0.03"}
# The profile that takes bf16 and TF32 without a reason.
_FAST = {"RUN_PROFILE_MAXOUT_SPEED": "y"}
# Settings of the base without which a symbol would have nothing to act on.
_BASE: Mapping[str, Settings] = {
    "SPAM_CLIP_DELAY": {"SPAM_THETA": "1"},
    "SPAM_SPIKE_THRESHOLD": _SPIKES,
    "SPAM_SPIKE_WINDOW": _SPIKES,
    "SPAM_MOMENT_DAMPING": _SPIKES,
    "SPAM_VARIANCE_DAMPING": _SPIKES,
    "PRECISION": _FAST,
    "PRECISION_WHY": _FAST,
    "MATMUL_WHY": _FAST,
    # Fewer blocks than the context has.
    "NSA_SELECT_BY": {"NSA_SELECT_COUNT": "4"},
    "NSA_SELECT_BLOCK": {"NSA_SELECT_COUNT": "4"},
    # The first variant that trains for longer.
    "ADAMWPRUNE_STRETCH": {"ADAMWPRUNE_VARIANT_BITTER3": "y"},
}
# Values of the small base itself, which shrinking would not leave.
_SMALL: Mapping[str, Mapping[str, Value]] = {
    "BLOCK_SIZE": {"EVAL_TOKENS": 256},
    "BUDGET": {"MAX_TOKENS": 160, "GPT2_MAX_TIME": 1},
    "MAX_TOKENS": {"BUDGET": "tokens", "MAX_TOKENS": 320},
    # More blocks than are selected.
    "NSA_SELECT_COUNT": {
        "BLOCK_SIZE": 32,
        "NSA_COMPRESS_BLOCK": 4,
        "NSA_COMPRESS_STRIDE": 2,
        "NSA_SELECT_BLOCK": 4,
        "NSA_SELECT_COUNT": 3,
        "NSA_WINDOW": 4,
    },
}
# What a rule wants to be changed with it.
_TOGETHER: Mapping[str, Mapping[str, Value]] = {
    "GLOBAL_BATCH": {"GLOBAL_BATCH": 4, "GRAD_ACCUMULATION": 4},
    "BATCH_SIZE": {"BATCH_SIZE": 2, "GRAD_ACCUMULATION": 1},
    "GRAD_ACCUMULATION": {"BATCH_SIZE": 2, "GRAD_ACCUMULATION": 1},
    "LOADER_WORKERS": {"LOADER_WORKERS": 1, "PREFETCH_FACTOR": 2},
    # Empty where the device is to know it.
    "PEAK_TFLOPS": {"PEAK_TFLOPS": "1.5"},
}


def work(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """In a worker: each symbol, and what is wrong with it, or ""."""
    tree = Tree()
    with Workshop() as workshop:
        effects = Effects(workshop)
        for name in names:
            fault = ""
            with Outcome() as outcome:
                fault = wrong(tree, name, effects)
            yield name, outcome.text or fault


class Effects:
    """What configurations compute and learn, each found out once."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._fingerprints: dict[str, Fingerprint] = {}
        self._runs: dict[str, tuple[Any, ...]] = {}

    def differ(self, a: Config, b: Config) -> bool:
        """As functions of their parameters, or as runs of the trainer."""
        return not same(self._fingerprint(a), self._fingerprint(b)) or self._run(a) != self._run(b)

    def _fingerprint(self, config: Config) -> Fingerprint:
        key = repr(sorted(config.values.items()))
        if key not in self._fingerprints:
            case = Case("knobs", "knobs", "knobs", config)
            self._fingerprints[key] = fingerprint(_Small(case, self._workshop))
        return self._fingerprints[key]

    def _run(self, config: Config) -> tuple[Any, ...]:
        """Steps, and the loss and size of an evaluation after them: any other weight shows."""
        key = repr(sorted(config.values.items()))
        if key not in self._runs:
            records = Records(RunDir(self._workshop.new_folder()), lambda event: None)
            session = open_session(config, self._workshop.prepared(config), records)
            warm_up(session)
            limit = config.run_time_limit_seconds
            train.train(session, Stop(lambda: False, limit, session.group.agree))
            found = session.evaluate(session.model)
            assert found is not None
            self._runs[key] = (session.iteration, found.loss, found.tokens)
            records.close()
        return self._runs[key]


class _Small(Subject):
    """A configuration that is small already."""

    @property
    def exact(self) -> Config:  # type: ignore[override]
        """Without dropout and narrow types."""
        return changed(self.config, DROPOUT="0.0", PRECISION="fp32")


def reveal(tree: Tree, item: Symbol | Choice) -> Settings:
    """The fewest settings with which a user could set ``item``; ConfigError where none are found."""
    settings = _reveal(tree, item, {})
    if settings is None:
        raise ConfigError(f"{item.name}: no base was found on which it can be set")
    return settings


def wrong(tree: Tree, name: str, effects: Effects) -> str:
    """What is wrong with the symbol or choice ``name``; "" where it does as it is declared."""
    item = tree.find(name)
    assert item is not None
    reader = readers().get(name)
    acts = reader is None or reader.identity
    try:
        settings = reveal(tree, item) | _BASE.get(name, {})
        base = changed(_small(resolved(tree, settings)), **_SMALL.get(name, {}))
        flips = list(_flips(tree, item, settings, base))
    except ConfigError as error:
        return str(error)
    if not flips:
        return "has no other value on its base"
    changes = (effects.differ(base, flipped) for flipped in flips)
    if not acts:
        return "is declared to change nothing, and does" if any(changes) else ""
    if not isinstance(item, Choice):
        return "" if any(changes) else "changes nothing"
    same_as = base.values[name]
    idle = [str(f.values[name]) for f, differs in zip(flips, changes, strict=True) if not differs]
    return f"{', '.join(idle)} is no other than {same_as}" if idle else ""


def _small(config: Config) -> Config:
    return shrink(config, DROPOUT="0.0", PRECISION="fp32")


def _flips(tree: Tree, item: Symbol | Choice, settings: Settings, base: Config) -> Iterator[Config]:
    """The base with other values of ``item`` alone, as far as they are legal."""
    if item.name in _TOGETHER:
        yield changed(base, **_TOGETHER[item.name])
        return
    smalls = [_small(config) for config in _reconfigured(tree, item, settings)]
    other = [small for small in smalls if small.values[item.name] != base.values[item.name]]
    if other:
        yield from (changed(small, **_SMALL.get(item.name, {})) for small in other)
        return
    for value in _other_values(item, base.values[item.name]):
        try:
            yield changed(base, **{item.name: value})
        except ConfigError:
            continue


def _reconfigured(tree: Tree, item: Symbol | Choice, settings: Settings) -> Iterator[Config]:
    """By way of Kconfig, for what makes other symbols available."""
    applicable(tree, settings)
    if isinstance(item, Choice):
        names = [m.name for m in item.syms if m.visibility and m is not item.selection]
        given = [{name: "y"} for name in names]
    elif item.orig_type is BOOL:
        given = [{item.name: "n" if item.str_value == "y" else "y"}]
    else:
        given = []
    for more in given:
        try:
            yield resolved(tree, applicable(tree, settings | more))
        except ConfigError:
            continue


def _other_values(item: Symbol | Choice, value: Value) -> Iterator[Value]:
    """Values near and far; of a choice and a bool all."""
    if isinstance(item, Choice):
        members = (m.name.removeprefix(f"{item.name}_").lower() for m in item.syms)
        yield from (member for member in members if member != value)
    elif item.orig_type is BOOL:
        yield not value
    elif item.orig_type is INT:
        number = int(value)
        low, high = (int(bound.str_value) for bound in item.ranges[0][:2])
        near = dict.fromkeys((2 * number, number + 1, number // 2, number - 1, low))
        yield from (n for n in near if low <= n <= high and n != number)
    elif readers()[item.name].kind is float:
        real, reader = float(value), readers()[item.name]
        around = dict.fromkeys((real / 2, 2 * real, real + 0.5, reader.low, reader.high))
        yield from (str(x) for x in around if x is not None and x != real)
    else:
        yield f"{value}x"


def _reveal(tree: Tree, item: Symbol | Choice, settings: Settings) -> Settings | None:
    settings = applicable(tree, settings)
    if item.visibility:
        return settings
    conditions = [node.prompt[1] for node in item.nodes if node.prompt] + [item.direct_dep]
    needed: set[Any] = set()
    for condition in conditions:
        needed |= {found for found in expr_items((AND, condition, condition)) if found.nodes}
    ways = [list(_changes(tree, operand, settings)) for operand in sorted(needed, key=_name)]
    for combined in sorted(itertools.product(*ways), key=lambda c: sum(map(len, c))):
        trial = dict(settings)
        for change in combined:
            trial |= change
        trial = applicable(tree, trial)
        if item.visibility:
            return trial
    return None


def _changes(tree: Tree, operand: Symbol | Choice, settings: Settings) -> Iterator[Settings]:
    """Ways to give an operand of a condition another value; first, to leave it."""
    yield {}
    if isinstance(operand, Choice):
        yield _reveal(tree, operand, settings) or {}
        return
    before = applicable(tree, settings)
    if operand.orig_type is INT and operand.visibility:
        yield {operand.name: str(int(operand.str_value) + 1)}
    if operand.orig_type is not BOOL:
        return
    if operand.str_value == "y" and operand.choice:
        yield from ({m.name: "y"} for m in operand.choice.syms if m is not operand)
    elif operand.str_value == "y":
        yield {operand.name: "n"}
    elif (shown := _reveal(tree, operand, before)) is not None:
        yield shown | {operand.name: "y"}


def _name(item: Symbol | Choice) -> str:
    return str(item.name)
