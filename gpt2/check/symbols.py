"""The ``make check-symbols`` command: every symbol has an effect, or is declared to have none.

Changed alone on a small base, a symbol must change what is computed, learned or evaluated; a symbol
declared to leave results unchanged must not change a bit. This is a property of the tree, not of a
step. Imports no torch.
"""

from collections.abc import Iterator, Sequence

from gpt2.check.command import check_executor
from gpt2.check.fields import REGISTRIES, fields_by_symbol
from gpt2.config import StudyConfig
from lib.config.tree import KconfigTree, SymbolInfo
from lib.console import log
from lib.env.gpu import usable_cores
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem

# Symbols whose effect a small run on the CPU cannot show, with the test that shows it.
NOT_TESTABLE_ON_CPU = {
    "MODEL_SIZE": "only sets defaults",
    "RUN_PROFILE": "only sets defaults and rules",
    "DEVICE": "a GPU",
    "MATMUL_PRECISION": "matrix products on a GPU",
    "CUDNN_BENCHMARK": "kernels of a GPU",
    "DETERMINISTIC": "operations of a GPU",
    "GPUS": "several processes",
    "DDP_SAFE": "several processes",
    "GPT2_MAX_TIME": "a time budget, which is not deterministic",
    "OOM_FALLBACK": "running out of memory",
    "OOM_MICRO_BATCH": "running out of memory",
    "OOM_CHECKPOINTING": "running out of memory",
    "OOM_CHECKPOINTING_FIRST": "running out of memory",
    "INIT_FROM": "pretrained weights",
    "DATASET": "downloads",
    "DATASET_TOKENS": "downloads",
    "DATASET_PATH": "downloads",
    "DATASET_SUBSET": "downloads",
    "DATASET_REVISION": "downloads",
    "TOKENIZER": "a different token stream",
    "VAL_FRACTION": "a different token stream",
    "CUSTOM_PATH": "a different token stream",
    "CUSTOM_VAL_PATH": "a different token stream",
    "CUSTOM_FORMAT": "a different token stream",
    "CUSTOM_TEXT_FIELD": "a different token stream",
}


def checkable_symbols(tree: KconfigTree) -> list[SymbolInfo]:
    """Return the symbols and choices whose effect is tested.

    Excluded are members of choices, symbols that only plan runs, and symbols that only select a
    backend, which may or may not change the last bits.
    """
    selecting = {name for registry in REGISTRIES for name in registry.symbols()}
    not_tried = {name for name, r in fields_by_symbol().items() if r.owner is StudyConfig or r.form}
    candidates = (fields_by_symbol().keys() | selecting) - not_tried - NOT_TESTABLE_ON_CPU.keys()
    return [info for info in tree.symbols() if info.name in candidates and not info.choice]


def check_symbols(names: str = "") -> tuple[int, str]:
    """Test ``names``, or every symbol, in workers. Return the exit code and the text for stdout."""
    requested, available = names.replace(",", " ").split(), checkable_symbols(KconfigTree())
    available_names = {info.name for info in available}
    if unknown := [name for name in requested if name not in available_names]:
        raise ConfigError(*(_unknown(name) for name in unknown))
    selected = [info for info in available if not requested or info.name in requested]
    workers = min(usable_cores(), len(selected))
    shares = [([info.name for info in selected[i::workers]],) for i in range(workers)]
    problems: dict[str, str] = {}
    for done, (name, problem) in enumerate(check_executor().call_many(_check_effects, shares), 1):
        problems[name] = problem
        if done % 20 == 0:
            log("SYMBOLS", f"{done}/{len(selected)} symbols")
    lines = [
        f"FAIL  {info.where}: {info.name}: {problems[info.name]}  [make check-symbols SYM={info.name}]"
        for info in selected
        if problems[info.name]
    ]
    code = EXIT_FAILED if lines else EXIT_DONE
    lines.append(f"{len(selected) - len(lines)} passed, {len(lines)} failed")
    return code, "\n".join(lines) + "\n"


def _check_effects(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Test symbols in a worker, which has torch loaded."""
    from gpt2.check.symbol_effect import check_effects

    return check_effects(names)


def _unknown(name: str) -> Problem:
    if name in fields_by_symbol() and fields_by_symbol()[name].form:
        reason = "only selects a backend, which affects rounding, memory and time"
        return Problem(f"{name}: {reason}", "SYM", code="usage.unsupported-symbol")
    if name in NOT_TESTABLE_ON_CPU:
        reason = f"no effect in a small run on a CPU ({NOT_TESTABLE_ON_CPU[name]})"
        return Problem(f"{name}: {reason}", "SYM", code="usage.unsupported-symbol")
    return Problem(f"{name}: not a symbol of a run", "SYM", code="config.unknown-symbol")
