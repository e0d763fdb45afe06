"""A step's name states what is built: its title and slug, against facts measured on the model.

The vocabulary below is a second source beside the step's symbols: it turns phrases of titles and
words of slugs into facts. A new step whose title has a number, or that changes a fact, needs a
phrase. The titles of a user's own study are free: only their numbers must be those of the model or of
the step's settings. Neither is a title compared with what the configuration, as with SET=, gives the
baseline in place of the facts that its title states.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from gpt2.attention.components import RowChunk, Window
from gpt2.check.cases import CheckCase, CheckFinding
from gpt2.check.config_checks import matrix_elements
from gpt2.check.subject import StepUnderTest
from gpt2.model import GPT, Block
from lib.config.tree import KconfigTree
from lib.pruning.layers import NeverPruned

Facts = dict[str, Any]
# A value that depends on the study or on the facts of the parent.
Relative = Callable[[StepUnderTest, Facts], Any]
_NUMBERS = {"one": 1, "two": 2}
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\b(?:one|two)\b")
_LATENT = {"projection": "latent", "expansions": "per head"}
_RECIPROCAL = {"reciprocal": True, "alpha per head": False}
_GATE = {"head gate": True, "head gate reads": "the current token"}
_MIX = {"token mix": True, "token mix keeps": "topk", "token mix detached": True}
_ROW_GATE = {
    "row gate": True,
    "row gate reads": "top-k",
    "row gate acts on": "the output",
    "row gate averages heads": False,
    "row gate detached": False,
}
_ALL = _LATENT | _RECIPROCAL | _GATE | _MIX | _ROW_GATE
_GPT2 = {
    "projection": "dense",
    "positions": "learned",
    "pattern": "full",
    "reciprocal": False,
    "row gate": False,
    "head gate": False,
    "token mix": False,
    "coupling": "none",
    "MLP / attention": 2.0,
}
_NSA = {
    "pattern": "nsa",
    "branches": ("compressed", "selected", "window"),
    "branches share keys": False,
    "blocks compressed by": "mlp",
    "branch gates": "sigmoid",
    "blocks selected by": "score",
}


def _as_parent(symbol: str, default: str) -> Relative:
    """Return the value of a pruned parent, else the default."""
    return lambda subject, parent: parent.get(symbol) or default


_PRUNING = {
    "PRUNING_SCOPE": _as_parent("PRUNING_SCOPE", "global"),
    "PRUNING_RAMP": _as_parent("PRUNING_RAMP", "cubic"),
}


def _but(branch: str) -> Relative:
    return lambda subject, parent: tuple(b for b in parent["branches"] or () if b != branch)


def _keys_of_nsa(subject: StepUnderTest, parent: Facts) -> int:
    """Return the keys that the last token reads in the step ``nsa``, at most, from its symbols."""
    nsa = subject.study_cases.get("nsa")
    if nsa is None or nsa.config is None:
        return int(model_facts(subject)["window"])
    names = ("BLOCK_SIZE", "NSA_COMPRESS_BLOCK", "NSA_COMPRESS_STRIDE", "NSA_SELECT_BLOCK")
    length, block, stride, select = (int(nsa.config.values[name]) for name in names)
    count, window = (int(nsa.config.values[name]) for name in ("NSA_SELECT_COUNT", "NSA_WINDOW"))
    return (length - block) // stride + 1 + min(count * select, length) + min(window, length)


_PHRASES_FILE = "TITLE_PHRASES in gpt2/check/naming_checks.py"
# Phrases of titles, and the facts that each states; groups of the expression are its numbers.
TITLE_PHRASES: Sequence[tuple[str, Callable[[re.Match[str]], Facts]]] = (
    (r"\bGPT-2\b", lambda m: {}),
    (r"\breciprocal attention\b", lambda m: _RECIPROCAL),
    (r"\ba band of (\d+) tokens\b", lambda m: {"reciprocal": True, "band": int(m[1])}),
    (r"\bevery head learns its alpha\b", lambda m: {"alpha per head": True}),
    (r"\blatent attention\b", lambda m: _LATENT),
    (r"\bheads share K and U\b", lambda m: {"expansions": "shared"}),
    (
        r"\b(one|two|\d+) heads? of keys and values\b",
        lambda m: {"projection": "grouped", "key/value heads": _number(m[1])},
    ),
    (
        r"\bMLP as the baseline's\b",
        lambda m: {"MLP weights": lambda subject, parent: parent["MLP weights"]},
    ),
    (r"\bMLP at ([\d.]+) times attention\b", lambda m: {"MLP / attention": float(m[1])}),
    (
        r"\bshare ([\d.]+) %",
        lambda m: {"share of the MLP": float(m[1]) / 100, "equal shares in every block": True},
    ),
    (r"\bpruning to ([\d.]+) %", lambda m: {"sparsity": float(m[1]) / 100}),
    (r"\b(magnitude|movement) pruning\b", lambda m: {"PRUNING": m[1], **_PRUNING}),
    (r"\bstate pruning\b", lambda m: {"PRUNING": "state"}),
    (r"\bMLP gates the next block's heads\b", lambda m: _GATE),
    (r"\bmixes tokens by attention weights\b", lambda m: _MIX),
    (r"\bboth MLP mechanisms\b", lambda m: _GATE | _MIX),
    (r"\bthe gate reads a causal running mean\b", lambda m: {"head gate reads": "a running mean"}),
    (r"\bcross-token gate\b", lambda m: _ROW_GATE),
    (r"\btop-k\b", lambda m: {"row gate reads": "top-k"}),
    (r"\bon the output\b", lambda m: {"row gate acts on": "the output"}),
    (r"\bthe gate acts on scores\b", lambda m: {"row gate acts on": "scores"}),
    (r"\brow's entropy\b", lambda m: {"row gate reads": "entropy"}),
    (r"\brow's largest weight\b", lambda m: {"row gate reads": "max"}),
    (r"\broot of the row's sum of squares\b", lambda m: {"row gate reads": "rms"}),
    (r"\bheads share the mean of their statistics\b", lambda m: {"row gate averages heads": True}),
    (r"\bno gradient through the statistic\b", lambda m: {"row gate detached": True}),
    (r"\ball mechanisms\b", lambda m: _ALL),
    (r"\bone matrix for both directions\b", lambda m: {"coupling": "tied"}),
    (r"\ba matrix for each direction\b", lambda m: {"coupling": "untied"}),
    (r"\ba scalar for each head\b", lambda m: {"coupling": "scalar"}),
    (r"\bweights above the row's root mean square\b", lambda m: {"token mix keeps": "rms"}),
    (r"^all weights$", lambda m: {"token mix keeps": "none"}),
    (r"\bthe mix teaches attention too\b", lambda m: {"token mix detached": False}),
    (r"\brotated by their positions\b", lambda m: {"positions": "rotary"}),
    (r"\ba window of (\d+) tokens\b", lambda m: {"pattern": "window", "window": int(m[1])}),
    (
        r"\ba window of as many tokens as NSA reads at most\b",
        lambda m: {"pattern": "window", "window": _keys_of_nsa},
    ),
    (r"\bfull attention\b", lambda m: {"pattern": "full"}),
    (r"\bnative sparse attention\b", lambda m: _NSA),
    (
        r"\bblocks (\d+)/(\d+) \(phi (\d+)\), (\d+) of (\d+), window (\d+)\b",
        lambda m: {"NSA sizes": tuple(map(int, m.groups()))},
    ),
    (r"\bbranches share keys and values\b", lambda m: {"branches share keys": True}),
    (r"\bcompressed by the mean alone\b", lambda m: {"blocks compressed by": "mean"}),
    (r"\bgates sum to one\b", lambda m: {"branch gates": "softmax"}),
    (r"\bblocks drawn, not scored\b", lambda m: {"blocks selected by": "random"}),
    (r"\bmeans of keys rank blocks\b", lambda m: {"blocks compressed by": "mean"}),
    (r"\bno compressed branch\b", lambda m: {"branches": _but("compressed")}),
    (
        r"\bno selected branch\b",
        lambda m: {"branches": _but("selected"), "blocks selected by": None},
    ),
    (r"\bno window\b", lambda m: {"branches": _but("window")}),
)
# Words of slugs, and the facts that each states unless the title states others.
SLUG_WORDS: Mapping[str, Facts] = {
    "golden": {"MLP / attention": 2.5},
    "ra": _RECIPROCAL,
    "mla": _LATENT,
    "ract": _ROW_GATE,
    "gate": _GATE,
    "cross": _MIX,
    "mech": _GATE | _MIX,
    "full": _ALL,
    "gqa": {"projection": "grouped"},
    "mqa": {"projection": "grouped", "key/value heads": 1},
    "sliding": {"pattern": "window"},
    "rope": {"positions": "rotary"},
    "nsa": _NSA,
}
_UNREAD_NUMBER = re.compile(r"\d+(?:\.\d+)?|\b(?:one|two|three|four|half|third|quarter|twice)\b")
# Tolerances of measured numbers: relative, and absolute because widths are rounded.
_RELATIVE = {"MLP / attention": 0.01}
_ABSOLUTE = {"share of the MLP": 0.02, "sparsity": 0.005}
# Facts that other changes move too: compared only if the name states them.
_CONSEQUENCES = {
    *("MLP / attention", "MLP weights", "sparsity", "equal shares in every block", "NSA sizes")
}


def check_named(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the facts that slug and title state, and that the step changes no other fact."""
    case = subject.case
    if not case.title:
        return []
    stated, findings = _stated_by_user(case) if case.is_own else _stated(case)
    facts = _all_facts(subject)
    parent = _all_facts(subject.for_case(subject.parent)) if subject.parent else {}
    if "sparsity" in stated:
        facts["sparsity"] = _sparsity(subject)
    # What a user's title does not state, or states in words of another meaning, and what the
    # user's base configuration gives to the baseline.
    uncompared: list[str] = []
    subject.facts["named"] = {
        "stated": sorted(stated),
        "title": case.title,
        "uncompared": uncompared,
    }
    expected_facts = {n: v(subject, parent) if callable(v) else v for n, v in stated.items()}
    for name, expected in expected_facts.items():
        if _agree(name, facts[name], expected):
            continue
        is_free = case.is_own and not _is_number(expected)
        if is_free or _is_of_base(subject, "" if callable(stated[name]) else name):
            uncompared.append(name)
        else:
            what = f"{name} {_text(expected)}, as {case.slug!r} ({case.title}) states"
            findings.append(CheckFinding("stated-fact", what, _text(facts[name])))
    for what, found, name in _unstated_changes(subject, facts, stated):
        if case.is_own or _is_of_base(subject, name):
            uncompared.append(name)
        else:
            advice = f"{case.title!r} does not state it: add a phrase to {_PHRASES_FILE}"
            findings.append(CheckFinding("unstated-change", what, f"{found}; {advice}"))
    return findings if case.is_own else findings + _unstated_numbers(case, expected_facts)


def _unstated_changes(
    subject: StepUnderTest, facts: Facts, stated: Facts
) -> Iterator[tuple[str, str, str]]:
    """Yield the expected and the found value of each fact that differs, and the name of the fact.

    A step has the facts of its parent. In a study of this tree, it also has those of the baseline:
    a name that stated only the last change would fit another parent too.
    """
    compared = sorted(facts.keys() - stated.keys() - _CONSEQUENCES)
    others = {} if subject.parent is None else {subject.parent.slug: compared}
    if not subject.case.is_own and (baseline := _baseline(subject)) is not None:
        # The share of a step with mechanisms is stated where it changes.
        names = [n for n in compared if n != "share of the MLP" and not _is_of_base(subject, n)]
        others.setdefault(baseline.slug, names)
    for slug, names in others.items():
        known = _all_facts(subject.for_case(subject.study_cases[slug]))
        for name in names:
            before, after = known.get(name), facts[name]
            if None not in (before, after) and not _agree(name, after, before):
                what = f"{name} {_text(before)} as in {slug}, or stated in the title"
                yield what, _text(after), name


def _baseline(subject: StepUnderTest) -> CheckCase | None:
    """Return the first step of the study, or None if it does not resolve."""
    cases = subject.study_cases.values()
    return next((case for case in cases if not case.parent and case.config), None)


def _is_of_base(subject: StepUnderTest, name: str) -> bool:
    """Return whether the configuration gives the baseline another value than its title states.

    Without a name, any value: a fact relative to other steps depends on all of them.
    """
    baseline = _baseline(subject)
    if baseline is None or baseline.delta:
        return False
    expected, facts = _stated(baseline)[0], model_facts(subject.for_case(baseline))
    changed = {each for each, value in expected.items() if not _agree(each, facts[each], value)}
    return name in changed if name else bool(changed)


def _unstated_numbers(case: CheckCase, stated: Facts) -> list[CheckFinding]:
    """Check that each number that the step sets is a default in Kconfig, or stated by its name.

    A number of the name states one setting.
    """
    words = [m[0] for m in _NUMBER.finditer(f"{case.title} {case.slug}")]
    numbers = [float(_NUMBERS.get(word, word)) for word in words]
    derived = {float(v) for v in stated.values() if isinstance(v, int | float)}
    findings = []
    for name, value in case.delta.items():
        if isinstance(value, bool) or not _NUMBER.fullmatch(str(value)):
            continue
        number, defaults = float(value), _defaults(name)
        named = next((n for n in numbers if number in (n, n / 100)), None)
        if named is not None:
            numbers.remove(named)
        elif number not in derived | {float(text) for text in defaults}:
            what = f"{name}={' or '.join(defaults)}, the default, or a number in the title"
            findings.append(CheckFinding("unstated-number", what, f"{name}={value}"))
    return findings


@cache
def _defaults(name: str) -> tuple[str, ...]:
    """Return the numbers that the Kconfig file has as defaults of a symbol."""
    symbol = KconfigTree().find(name)
    defaults = () if symbol is None else symbol.defaults
    texts = [value.str_value for value, _ in defaults if not isinstance(value, tuple)]
    return tuple(text for text in texts if _NUMBER.fullmatch(text))


def _number(text: str) -> int:
    return _NUMBERS[text] if text in _NUMBERS else int(text)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _agree(name: str, value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, float):
        return math.isclose(
            value,
            expected,
            rel_tol=_RELATIVE.get(name, 0.0),
            abs_tol=_ABSOLUTE.get(name, 0.0),
        )
    return bool(value == expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stated_by_user(case: CheckCase) -> tuple[Facts, list[CheckFinding]]:
    """Return the facts that the title states, and a finding for each number that is no setting."""
    stated, rest = _phrases(case.title)
    values = {text for value in case.delta.values() if (text := _number_text(str(value)))}
    findings = []
    for word in re.findall(r"\d+(?:\.\d+)?(?: ?%)?", rest):
        number = float(word.rstrip(" %"))
        if f"{number / 100 if word.endswith('%') else number:g}" not in values:
            what = f"a value that {case.slug!r} sets, or a fact of the model"
            findings.append(CheckFinding("stated-number", what, f"{word} in {case.title!r}"))
    return stated, findings


def _number_text(text: str) -> str:
    """Return a number in one spelling, "" for other text."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return ""


def _phrases(title: str) -> tuple[Facts, str]:
    """Return the facts that phrases of a title state, and the title without these phrases."""
    stated: Facts = {}
    rest = title
    for phrase, facts in TITLE_PHRASES:
        for match in re.finditer(phrase, title):
            stated |= facts(match)
            rest = rest.replace(match[0], "")
    return stated, rest


def _stated(step: CheckCase) -> tuple[Facts, list[CheckFinding]]:
    """Return the facts that slug and title state, and a finding for a number that is not read."""
    stated: Facts = dict(_GPT2) if step.title == "GPT-2" else {}
    for word in step.slug.split("-"):
        stated |= SLUG_WORDS.get(word, {})
    slug = step.slug
    if match := re.search(r"\bpruned-(\d+)\b", slug):
        stated["sparsity"] = int(match[1]) / 100
        slug = slug.replace(match[0], "")
    facts, title = _phrases(step.title)
    stated |= facts
    unread = [*_UNREAD_NUMBER.findall(title), *re.findall(r"\b\d+\b", slug)]
    if not unread:
        return stated, []
    text = f"{unread[0]!r} in {step.slug!r} ({step.title}): add a phrase to {_PHRASES_FILE}"
    return stated, [CheckFinding("stated-number", "a number that can be measured", text)]


def _sparsity(subject: StepUnderTest) -> float:
    """Return the share of zeros that the traced run reached in the matrices of blocks."""
    traced = subject.traced_run
    modules = traced.run.session.state.model.named_modules()
    never = tuple(f"{path}." for path, module in modules if isinstance(module, NeverPruned))
    blocks = [
        w
        for name, w in traced.final_weights.items()
        if w.ndim >= 2 and name.startswith("h.") and not name.startswith(never)
    ]
    return sum(int((w == 0).sum()) for w in blocks) / sum(w.numel() for w in blocks)


# Symbols that all steps of a study share, unless a title states the change.
_SHARED_SYMBOLS = (
    *("LEARNING_RATE", "LR_SCHEDULE", "WARMUP_STEPS", "OPTIMIZER", "WEIGHT_DECAY", "GRAD_CLIP"),
    *(
        "BUDGET",
        "MAX_ITERS",
        "MAX_TOKENS",
        "MAX_FLOPS",
        "GLOBAL_BATCH",
        "BLOCK_SIZE",
        "EVAL_TOKENS",
    ),
    *("DATASET", "TOKENIZER", "PRECISION", "DROPOUT", "SEED", "INIT_FROM"),
    *("N_LAYER", "N_EMBD", "N_HEAD", "ACTIVATION", "BIAS"),
    *("PRUNING", "PRUNING_SCOPE", "PRUNING_RAMP", "PRUNING_INCLUDE_EMBEDDINGS"),
)


def _all_facts(subject: StepUnderTest) -> Facts:
    """Return the facts of the model, and the values of the symbols that the steps share."""
    values = subject.config.values
    shared = {name: values[name] for name in _SHARED_SYMBOLS if name in values}
    return {**model_facts(subject), **shared}


def model_facts(subject: StepUnderTest) -> Mapping[str, Any]:
    """Return the facts of the model at full size; None if a fact does not apply."""
    facts = subject.context.model_facts
    if subject.case.slug not in facts:
        facts[subject.case.slug] = _measured(subject.full_model)
    return facts[subject.case.slug]


def _measured(model: GPT) -> Facts:
    shape = model.config.shape
    block = model.blocks[0]
    projection: Any = block.attn.c_attn
    kind = type(projection).__name__.lower()
    columns = projection.out_features - shape.n_embd if kind == "dense" else None
    if columns and columns < 2 * shape.n_embd:
        kind = "grouped"
    terms = block.attn.terms
    shared = kind == "latent" and projection.expand_k.out_features == shape.head_dim
    facts = {
        "projection": kind,
        "key/value heads": columns and columns // (2 * shape.head_dim),
        "expansions": ("shared" if shared else "per head") if kind == "latent" else None,
        "positions": "rotary" if model.wpe is None else "learned",
        "reciprocal": "reciprocal" in terms,
        "alpha per head": bool(list(terms.parameters())) if "reciprocal" in terms else None,
        "band": terms["reciprocal"].reach if "reciprocal" in terms else None,
        "MLP weights": matrix_elements(block.mlp),
        "MLP / attention": matrix_elements(block.mlp) / matrix_elements(block.attn),
        "equal shares in every block": _equal_shares(model),
    }
    return facts | _pattern_facts(block, shape.block_size) | _gate_facts(block) | _mlp_facts(block)


def _equal_shares(model: GPT) -> bool:
    """Return whether every sized mechanism has one share of the MLP in all of its blocks."""
    shares: dict[str, list[float]] = {}
    for block in model.blocks:
        for name, part in block.mlp.mechanisms.items():
            shares.setdefault(name, []).append(matrix_elements(part) / matrix_elements(block.mlp))
    return all(max(each) - min(each) <= _ABSOLUTE["share of the MLP"] for each in shares.values())


def _pattern_facts(block: Block, length: int) -> Facts:
    pattern: Any = block.attn.pattern
    kind = type(pattern).__name__.lower()
    facts: Facts = {"pattern": kind, "window": None}
    if isinstance(pattern, Window):
        facts = {"pattern": "window" if pattern.width else "full", "window": pattern.width}
    names = ("branches share keys", "blocks compressed by", "branch gates", "blocks selected by")
    facts |= dict.fromkeys(("branches", "NSA sizes", *names))
    if kind != "nsa":
        return facts
    options = pattern.options
    facts |= dict(
        zip(names, (None, None, options.gate or None, options.select_by or None), strict=True)
    )
    facts["branches"] = tuple(options.branches)
    compressed = (options.compress, options.stride, options.hidden)
    facts["NSA sizes"] = (*compressed, options.count, options.select, options.window)
    facts["branches share keys"] = pattern.c_kv is None
    facts["blocks compressed by"] = "mean" if pattern.phi_k is None else "mlp"
    return facts


def _gate_facts(block: Block) -> Facts:
    gates = block.attn.gates
    names = ("reads", "acts on", "averages heads", "detached")
    if "ra_cross_token" not in gates:
        return {"row gate": False} | {f"row gate {name}": None for name in names}
    gate: Any = gates["ra_cross_token"]
    acts_on = "scores" if gate.scales_scores else "the output"
    values = (_statistic(gate), acts_on, gate.head_average, gate.detach_stats)
    return {"row gate": True} | {
        f"row gate {name}": value for name, value in zip(names, values, strict=True)
    }


def _statistic(gate: Any) -> str:
    """Return the name of the statistic that the gate computes from a row of known weights."""
    weights = torch.arange(1.0, 65.0) / 2080
    rows_BNrc = weights[None, None, None]
    value = float(gate.statistic(rows_BNrc, rows_BNrc.log(), RowChunk(63, 64, 0)))
    known = {
        "max": float(weights.max()),
        "rms": float(weights.square().sum().sqrt()),
        "entropy": float(-(weights * weights.log()).sum()) / math.log(64),
    }
    near = [name for name, expected in known.items() if abs(value - expected) < 1e-5]
    # The sum of any number of the largest weights.
    sums = weights.flip(0).cumsum(0)
    return near[0] if near else "top-k" if bool(((sums - value).abs() < 1e-5).any()) else "unknown"


def _mlp_facts(block: Block) -> Facts:
    parts: Any = block.mlp.mechanisms
    by_name = dict(parts.items())
    gate, mix = by_name.get("mlp_attn_gate"), by_name.get("mlp_cross_token")
    reader = block.attn.reader
    coupling = parts["mlp_latent"].coupling if "mlp_latent" in parts else None
    sized = sum(matrix_elements(part) for part in (gate, mix) if part is not None)
    facts: Facts = {
        "head gate": gate is not None,
        "head gate reads": None,
        "token mix": mix is not None,
        "token mix keeps": reader and reader.request.sparsity,
        "token mix detached": reader and reader.request.detach,
        "share of the MLP": sized / matrix_elements(block.mlp),
        "coupling": "none" if coupling is None else _tying(coupling),
    }
    if gate is not None:
        facts["head gate reads"] = "a running mean" if gate.options.pooled else "the current token"
    return facts


def _tying(coupling: nn.Module) -> str:
    matrices = sum(p.ndim >= 2 for p in coupling.parameters())
    return {0: "scalar", 1: "tied", 2: "untied"}[matrices]
