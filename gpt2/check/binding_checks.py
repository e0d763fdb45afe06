"""Symbols reach the fields, the model and the training that they name.

The second source of a binding is the rule that the words of a field are words of its symbol.
"""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from gpt2.check.cases import CheckFinding
from gpt2.check.fields import REGISTRIES, fields_by_symbol
from gpt2.check.short_run import ShortRun
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.model import Block
from gpt2.shape import ModelShape
from gpt2.training.budget import run_budget
from lib.config.field import SymbolValue, kconfig_fields
from lib.errors import ConfigError
from lib.tracking.options import TRACKERS

# Words of fields that state a unit.
_UNITS = {"seconds", "hours", "gib", "percent", "iterations"}
# Fields whose name has other words than their symbol.
_OTHER_NAMES = {
    "LR_SCHEDULE": "kind",
    "ON_DONE_CMD": "on_done_command",
    "ON_FAIL_CMD": "on_fail_command",
    "ON_STUDY_DONE_CMD": "on_study_done_command",
    "PRUNING_SPARSITY": "target",
    "SPAM_WARMUP_STEPS": "reset_warmup_steps",
}
# Fields that a rule changes together with the field of a symbol.
_FOLLOWERS = {"DATASET_STAND_IN": "DataOptions.dataset"}
# Changed symbols per step, besides those that the step sets; the first step changes all.
_SAMPLE = 8


@dataclass(frozen=True)
class _Leaf:
    """A bound field of a configuration: class and name, symbol, and value."""

    owner: str
    name: str
    symbol: str
    value: Any
    low: float | None
    high: float | None

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}"


def check_bound(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that one field reads each symbol, and that the built model has its value."""
    config = subject.config
    leaves = list(_leaves(config))
    return (
        _names(subject, leaves)
        or _values(config, leaves)
        or [*_changes(subject, leaves), *_sizes(subject), *_budgets(subject), *_trainer(subject)]
    )


def _leaves(value: Any) -> Iterator[_Leaf]:
    """Yield every bound field below ``value``."""
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        bound = {field.name: field.metadata for field in kconfig_fields(type(value))}
        for field in dataclasses.fields(value):
            inner = vars(value).get(field.name, None)
            if field.name in bound:
                data = bound[field.name]
                owner = type(value).__name__
                yield _Leaf(owner, field.name, data["symbol"], inner, data["low"], data["high"])
            else:
                yield from _leaves(inner)


def _names(subject: StepUnderTest, leaves: Sequence[_Leaf]) -> list[CheckFinding]:
    """Check that one field reads each symbol, and that its words are words of the symbol."""
    selecting = {name for registry in (*REGISTRIES, TRACKERS) for name in registry.symbols()}
    findings = [
        CheckFinding("one-reader", f"a field that reads {name}", "no field")
        for name in subject.case.delta
        if name in subject.config.values and name not in fields_by_symbol().keys() | selecting
    ]
    readers = Counter(leaf.symbol for leaf in leaves)
    for leaf in leaves:
        if readers[leaf.symbol] > 1:
            paths = ", ".join(other.path for other in leaves if other.symbol == leaf.symbol)
            text = f"read by {paths}"
            findings.append(CheckFinding("one-reader", f"one reader of {leaf.symbol}", text))
        elif not _fits(leaf):
            text = f"it reads {leaf.symbol}"
            expected = f"{leaf.path} reads the symbol that it names"
            findings.append(CheckFinding("named-reader", expected, text))
    return findings[:2]


def _fits(leaf: _Leaf) -> bool:
    if leaf.symbol in _OTHER_NAMES:
        return leaf.name == _OTHER_NAMES[leaf.symbol]
    words = leaf.symbol.lower().split("_")
    return leaf.name not in _OTHER_NAMES.values() and all(
        any(word.startswith(part) or part.startswith(word) for word in words)
        for part in leaf.name.split("_")
        if part not in _UNITS
    )


def _values(config: Config, leaves: Sequence[_Leaf]) -> list[CheckFinding]:
    """Check that every field has the value of its symbol, and each symbol of the step a reader."""
    return [
        CheckFinding("bound-value", f"{leaf.path} is {leaf.symbol}={text}", f"{leaf.value}")
        for leaf in leaves
        if not _is_value(leaf, config) and (text := config.values[leaf.symbol]) is not None
    ][:2]


def _is_value(leaf: _Leaf, config: Config) -> bool:
    """Return whether a field has its symbol's value, by the text of the value."""
    symbol_value = config.values[leaf.symbol]
    if leaf.symbol == "DATASET" and config.data.stand_in:
        return leaf.value in (symbol_value, "default")
    if isinstance(leaf.value, float):
        return leaf.value == float(symbol_value)
    if isinstance(leaf.value, tuple):
        words = str(symbol_value).replace(",", " ").split()
        kind = type(leaf.value[0]) if leaf.value else str
        return list(leaf.value) == [kind(word) for word in words]
    return type(leaf.value) is type(symbol_value) and leaf.value == symbol_value


# Changing one symbol changes one field.


def _changes(subject: StepUnderTest, leaves: Sequence[_Leaf]) -> list[CheckFinding]:
    """Change symbols of the step and a sample of the others, one at a time."""
    delta, sampled = subject.case.delta, list(leaves)
    if next(iter(subject.study_cases), subject.case.slug) != subject.case.slug:
        sampled = random.Random(subject.case.slug).sample(sampled, min(_SAMPLE, len(sampled)))
        sampled += [leaf for leaf in leaves if leaf.symbol in delta and leaf not in sampled]
    findings = []
    for leaf in sampled:
        changed = _with_other(subject.config, leaf)
        if changed is None:
            continue
        after = {other.path: other for other in _leaves(changed)}
        moved = [other.path for other in leaves if after[other.path].value != other.value]
        if not {leaf.path} <= set(moved) <= {
            leaf.path,
            _FOLLOWERS.get(leaf.symbol),
        } or not _is_value(after[leaf.path], changed):
            before, value = subject.config.values[leaf.symbol], changed.values[leaf.symbol]
            text = ", ".join(f"{path} becomes {after[path].value}" for path in moved) or "no field"
            expected = f"{leaf.symbol}={value} instead of {before} changes {leaf.path} alone"
            findings.append(CheckFinding("one-field", expected, text))
    return findings[:2]


def _with_other(config: Config, leaf: _Leaf) -> Config | None:
    """Return the configuration with another legal number or bool, or None if there is none."""
    for value in _others(leaf):
        try:
            return with_changes(config, **{leaf.symbol: value})
        except ConfigError:
            continue
    return None


def _others(leaf: _Leaf) -> Iterator[SymbolValue]:
    match leaf.value:
        case bool():
            yield not leaf.value
        case int():
            yield from (n for n in (leaf.value + 1, 2 * leaf.value, leaf.value // 2) if n > 0)
        case float():
            low, high = leaf.low, leaf.high
            numbers = (leaf.value * 0.9, leaf.value * 1.1, leaf.value + 0.01)
            inside = (
                x for x in numbers if (low is None or x >= low) and (high is None or x <= high)
            )
            yield from (repr(x) for x in inside if x != leaf.value)


# Values of the built model.


def _sizes(subject: StepUnderTest) -> list[CheckFinding]:
    """Check sizes of the model at full size against the symbols."""
    model, values = subject.full_model, subject.config.values
    block = model.blocks[0]
    rows = model.wte.num_embeddings
    built: dict[str, Any] = {
        "N_LAYER": len(model.blocks),
        "N_EMBD": model.wte.embedding_dim,
        "VOCAB_MULTIPLE": math.gcd(rows, int(values["VOCAB_MULTIPLE"])),
        "BIAS": block.attn.c_proj.bias is not None,
        "N_KV_HEAD": _key_value_heads(block, model.config.shape),
        "RECIPROCAL_WINDOW": _of_term(block, "reach"),
        "RECIPROCAL_ALPHA": _of_term(block, "constant"),
    }
    if values["ATTENTION_PATTERN"] == "sliding":
        # The widest row of a sequence that is longer than any window.
        pattern: Any = block.attn.pattern
        built["SLIDING_WINDOW"] = pattern.longest_row(2**30)
    if model.wpe is not None:
        built["BLOCK_SIZE"] = model.wpe.num_embeddings
    backend = block.attn.backend
    if values["ATTENTION_BACKEND"] == "rows" and backend != "own":
        built["ATTENTION_BACKEND"] = backend
    rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout)} | {block.attn.dropout}
    built["DROPOUT"] = rates.pop() if len(rates) == 1 else sorted(rates)
    active = {leaf.symbol for leaf in _leaves(subject.config)}
    return [
        CheckFinding("built-size", f"{name}={values[name]} in the model", f"{value}")
        for name, value in built.items()
        if name in active and not _same(value, values[name])
    ][:2] + _derived_sizes(subject)


def _derived_sizes(subject: StepUnderTest) -> list[CheckFinding]:
    """Check sizes that the documents derive from others: the vocabulary's rows, widths if 0."""
    model, values = subject.full_model, subject.config.values
    block, n_embd = model.blocks[0], int(values["N_EMBD"])
    multiple = int(values["VOCAB_MULTIPLE"])
    rows = math.ceil(subject.config.model.shape.vocab_size / multiple) * multiple
    sizes = [("VOCAB_MULTIPLE", model.wte.num_embeddings, rows)]
    if values["ATTENTION_PROJECTION"] == "latent":
        latent = block.attn.c_attn.get_submodule("c_k").get_parameter("weight").shape[0]
        derived = max(8, 8 * math.floor(n_embd / 6 / 8 + 0.5))
        sizes.append(("LATENT_DIM", latent, int(values["LATENT_DIM"]) or derived))
    if values["MLP_SIZING"] == "hidden":
        hidden = int(values["MLP_HIDDEN"]) or 4 * n_embd
        sizes.append(("MLP_HIDDEN", block.mlp.c_proj.in_features, hidden))
    return [
        CheckFinding("derived-size", f"{name}={values[name]}: {expected} in the model", str(built))
        for name, built, expected in sizes
        if built != expected
    ]


def _key_value_heads(block: Block, shape: ModelShape) -> int:
    """Return the heads of keys and values of a projection whose columns are q, k and v."""
    columns = vars(block.attn.c_attn).get("out_features", 0) - shape.n_embd
    return columns // (2 * shape.head_dim)


def _of_term(block: Block, name: str) -> Any:
    terms = block.attn.terms
    return vars(terms["reciprocal"])[name] if "reciprocal" in terms else None


def _same(value: Any, symbol_value: SymbolValue) -> bool:
    return bool(value == (float(symbol_value) if isinstance(value, float) else symbol_value))


def _budgets(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the length of each kind of budget: iterations, tokens, FLOPs and seconds."""
    small = subject.small
    per_step = int(small.values["GLOBAL_BATCH"]) * int(small.values["BLOCK_SIZE"])
    stretch = small.pruning.stretch
    amounts: dict[str, SymbolValue] = {
        "MAX_ITERS": 70,
        "MAX_TOKENS": 90 * per_step - 1,
        "MAX_FLOPS": str(79.5 * per_step * small.model.flops_per_token()),
        "GPT2_MAX_TIME": 110,
    }
    findings = []
    for kind, iterations, seconds in (
        ("iterations", 70, 0),
        ("tokens", 90, 0),
        ("flops", 80, 0),
        ("time", 0, 110),
    ):
        budget = run_budget(with_changes(small, BUDGET=kind, **amounts))
        lengths = budget.iterations, budget.seconds
        expected = round(iterations * stretch), seconds * stretch
        if lengths != expected:
            texts = [f"{n} iterations, {s:g} s" for n, s in (expected, lengths)]
            what = f"a budget of {kind}, with {amounts}: {texts[0]}"
            findings.append(CheckFinding("budget-length", what, texts[1]))
    return findings


# Other values than in any configuration, so that a constant in the code cannot pass for one.
_OTHER_VALUES: Mapping[str, SymbolValue] = {
    "GLOBAL_BATCH": 6,
    "BATCH_SIZE": 3,
    "GRAD_ACCUMULATION": 2,
    "GRAD_CLIP": "0.037",
    "LEARNING_RATE": "0.00123",
    "MIN_LEARNING_RATE": "0.00017",
    "WARMUP_STEPS": 0,
    "MAX_ITERS": 2,
    "EVAL_TOKENS": 137,
    "WEIGHT_DECAY": "0.073",
    "ADAM_BETA1": "0.87",
    "ADAM_BETA2": "0.953",
    "ADAM_EPS": "3e-7",
    "SGD_MOMENTUM": "0.83",
}
# Options of a parameter group in torch by symbol, with the index in a tuple.
_GROUP_OPTIONS = {
    "ADAM_BETA1": ("betas", 0),
    "ADAM_BETA2": ("betas", 1),
    "ADAM_EPS": ("eps", None),
    "SGD_MOMENTUM": ("momentum", None),
}


def _trainer(subject: StepUnderTest) -> list[CheckFinding]:
    """Return the findings of a training step with other values, once per process and optimizer."""
    shared = subject.context.shared_findings
    key = f"bound/{subject.small.optimizer.name}"
    if key not in shared:
        shared[key] = _other_training(subject)
    return list(shared[key])


def _other_training(subject: StepUnderTest) -> list[CheckFinding]:
    small, context = subject.small, subject.context
    active = {leaf.symbol for leaf in _leaves(small)}
    values = {name: value for name, value in _OTHER_VALUES.items() if name in active}
    config = with_changes(small, **values)
    run = ShortRun(config, context.prepare_data(config), context.new_run_dir())
    model, optimizer = run.session.state.model, cast(Any, run.session.state.optimizer)
    norms: list[float] = []
    rows: list[int] = []
    parameters = list(model.parameters())

    def record(*given: Any) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    optimizer.register_step_pre_hook(record)
    model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    run.step()
    run.close()
    built: dict[str, Any] = {"LEARNING_RATE": optimizer.param_groups[0]["lr"]}
    built |= {"GLOBAL_BATCH": sum(rows), "BATCH_SIZE": max(rows), "GRAD_ACCUMULATION": len(rows)}
    built["WEIGHT_DECAY"] = max(group["weight_decay"] for group in optimizer.param_groups)
    for name, (option, index) in _GROUP_OPTIONS.items():
        if name in values:
            value = optimizer.param_groups[0][option]
            built[name] = value if index is None else value[index]
    if run.gradient_norm > float(values["GRAD_CLIP"]):
        built["GRAD_CLIP"] = norms[0]
    length = config.model.shape.block_size
    windows = run.session.evaluate.windows
    predicted = sum(window.predicted for window in windows)
    if not 0 <= int(values["EVAL_TOKENS"]) - predicted < length:
        built["EVAL_TOKENS"] = predicted
    return [
        CheckFinding("trained-value", f"{name}={values[name]} in the training", f"{value:g}")
        for name, value in built.items()
        if not math.isclose(value, float(values[name]), rel_tol=1e-4)
    ]
