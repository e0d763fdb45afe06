"""``make knobs``: every symbol acts, or is declared not to; imports no torch.

Changed alone on a small base, a symbol changes what is computed, learned or evaluated; one that is
declared to change no bit of a result changes none. That is a property of the tree and not of a step.
"""

from gpt2.check.readers import REGISTRIES, readers
from gpt2.check.run import PRELOAD
from gpt2.config import StudyConfig
from lib.console import say
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.kconfig import SymbolInfo, Tree
from lib.machine.devices import usable_cores
from lib.runner.pool import Pool

# What a small run on the CPU cannot show, and why.
ELSEWHERE = {
    "MODEL_SIZE": "decides defaults alone",
    "RUN_PROFILE": "decides defaults and rules alone",
    "DEVICE": "a GPU",
    "MATMUL_PRECISION": "a GPU's products",
    "CUDNN_BENCHMARK": "a GPU's kernels",
    "DETERMINISTIC": "operations of a GPU",
    "GPUS": "several processes",
    "DDP_SAFE": "several processes",
    "GPT2_MAX_TIME": "seconds: no two runs are the same",
    "OOM_FALLBACK": "memory that runs out",
    "INIT_FROM": "weights of somebody else",
    "DATASET": "downloads",
    "DATASET_TOKENS": "downloads",
    "DATASET_PATH": "downloads",
    "DATASET_SUBSET": "downloads",
    "DATASET_REVISION": "downloads",
    "TOKENIZER": "another text of tokens",
    "VAL_FRACTION": "another text of tokens",
    "CUSTOM_PATH": "another text of tokens",
    "CUSTOM_VAL_PATH": "another text of tokens",
    "CUSTOM_FORMAT": "another text of tokens",
    "CUSTOM_TEXT_FIELD": "another text of tokens",
}


def knobs(tree: Tree) -> list[SymbolInfo]:
    """Symbols and choices of a run, without members of choices, what only plans runs, and what only
    chooses among forms of one function: there last bits may change or not."""
    selecting = {name for registry in REGISTRIES for name in registry.symbols()}
    told = {name for name, r in readers().items() if r.owner is StudyConfig or r.form}
    known = (readers().keys() | selecting) - told - ELSEWHERE.keys()
    return [info for info in tree.symbols() if info.name in known and not info.choice]


def check_knobs(names: str = "") -> tuple[int, str]:
    """Try ``names``, or every symbol, in workers; the exit code and the text for stdout."""
    asked, every = names.replace(",", " ").split(), knobs(Tree())
    known = {info.name for info in every}
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(*(_unknown(name) for name in unknown))
    tried = [info for info in every if not asked or info.name in asked]
    workers = min(usable_cores(), len(tried))
    shares = [([info.name for info in tried[i::workers]],) for i in range(workers)]
    pool = Pool((*PRELOAD, "gpt2.check.flip"), {"OMP_NUM_THREADS": "1"})
    faults: dict[str, str] = {}
    for done, (name, fault) in enumerate(pool.gather("gpt2.check.flip:work", shares), 1):
        faults[name] = fault
        if done % 20 == 0:
            say("KNOBS", f"{done}/{len(tried)} symbols")
    lines = [
        f"FAIL  {info.where}: {info.name}: {faults[info.name]}  [make knobs SYM={info.name}]"
        for info in tried
        if faults[info.name]
    ]
    code = EXIT_FAILED if lines else EXIT_DONE
    lines.append(f"{len(tried) - len(lines)} passed, {len(lines)} failed")
    return code, "\n".join(lines) + "\n"


def _unknown(name: str) -> Problem:
    if name in readers() and readers()[name].form:
        reason = "chooses among forms of one function: last bits, memory and time"
    else:
        reason = f"needs {ELSEWHERE[name]}" if name in ELSEWHERE else "is no symbol of a run"
    return Problem(f"{name}: {reason}", "SYM")
