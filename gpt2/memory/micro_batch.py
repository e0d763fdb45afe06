"""Automatic micro-batch (``BATCH_SIZE=0``): the largest that fits all runs; imports no torch."""

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2.config import Config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import EXIT_PREFLIGHT, PreflightError, Problem, RunError
from lib.files import json_digest, write_json
from lib.json_files import MissingRecord, read_json_object, typed
from lib.project import python_module_command
from lib.units import GIB, format_size

# Argument of gpt2.memory.predict.
LIMITS = "limits"
# Parts of a configuration that decide the memory of a step, beside its numbers of sequences.
_MEMORY_PARTS = ("model", "machine", "numerics", "optimizer", "pruning")


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch that fits every run of a plan in the memory of a process.

    ``run`` is a run that needs more memory than others; "" if all have the same limit.
    """

    size: int
    accumulation: int
    device: str
    memory_gib: float
    run: str

    def __str__(self) -> str:
        memory = format_size(self.memory_gib * GIB)
        return (
            f"BATCH_SIZE={self.size} GRAD_ACCUMULATION={self.accumulation}: the largest that is "
            f"predicted to fit {memory} of {self.device}{self.run and f' (limited by {self.run})'}"
        )


def micro_batch_layer(size: int, accumulation: int) -> ConfigLayer:
    """Return the settings that replace ``BATCH_SIZE=0``."""
    settings = {"BATCH_SIZE": size, "GRAD_ACCUMULATION": accumulation}
    return ConfigLayer.of("command line", "BATCH_SIZE=0", settings)


def is_automatic(layers: Sequence[ConfigLayer]) -> bool:
    """Return whether the layers set BATCH_SIZE to 0."""
    values = [a.value for layer in layers for a in layer.assignments if a.name == "BATCH_SIZE"]
    return values[-1:] == ["0"]


def with_one_sequence(tree: KconfigTree, layers: Sequence[ConfigLayer]) -> Sequence[ConfigLayer]:
    """Return the layers with a micro-batch of one sequence in place of BATCH_SIZE=0.

    Every configuration that resolves with another micro-batch resolves with this one.
    """
    if not is_automatic(layers):
        return layers
    values = tree.resolve(layers).values
    share = int(values["GLOBAL_BATCH"]) // int(values["GPUS"])
    return [*layers, micro_batch_layer(1, max(1, share))]


def largest_micro_batch(base: Config, configs: Mapping[str, Config], folder: Path) -> MicroBatch:
    """Return the largest micro-batch with which every configuration fits, by the name of its run.

    All configurations, and their ``base``, have micro-batches of one sequence. The result is stored
    in ``folder``, that of the study, because the identity of runs depends on it: later commands,
    also on other machines, read it. Raises PreflightError without the GPU that the configurations
    require, or if one sequence does not fit.
    """
    distinct = {_digest(config): name for name, config in configs.items()}
    key = json_digest({"base": _digest(base), "runs": sorted(distinct)})
    path = folder / f"micro-batch-{key[:8]}.json"
    try:
        return typed(MicroBatch, read_json_object(path), path, ())
    except MissingRecord:
        pass
    log("MEMORY", f"BATCH_SIZE=0: predicting the memory of {len(distinct)} configurations")
    limits = _predicted({name: configs[name] for name in distinct.values()})
    run, limit = min(limits["sizes"].items(), key=lambda item: item[1])
    count, memory_gib = base.train.grad_accumulation, limits["memory_gib"]
    share = math.gcd(count, *limits["shares"])
    sizes = [size for size in range(1, share + 1) if share % size == 0 and size <= limit]
    if not sizes:
        memory = f"{format_size(memory_gib * GIB)} of {limits['device']}"
        what = f"one sequence of {run} does not fit (expected at most {memory})"
        advice = "set GRAD_CHECKPOINTING=y, or a smaller model; make check shows the memory"
        raise PreflightError(Problem(what, "BATCH_SIZE", advice, code="memory.too-small"))
    limited_by = run if limit < max(limits["sizes"].values()) else ""
    chosen = MicroBatch(sizes[-1], count // sizes[-1], limits["device"], memory_gib, limited_by)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema_version": 1, **asdict(chosen)})
    log("MEMORY", str(chosen))
    return chosen


def _digest(config: Config) -> str:
    """Return the digest of the settings that the memory of a step depends on."""
    identity, train = config.identity(), config.train
    parts = {name: identity[name] for name in _MEMORY_PARTS}
    batch = [train.global_batch, train.batch_size, train.gpus]
    return json_digest({**parts, "batch": batch})


def _predicted(configs: Mapping[str, Config]) -> dict[str, Any]:
    """Return ``micro_batch_limits`` of ``gpt2.memory.predict``, from a process that imports torch."""
    done = run_predict(LIMITS, {name: dict(config.values) for name, config in configs.items()})
    if done.returncode == EXIT_PREFLIGHT:
        what = "0 requires the GPU whose memory decides (expected a visible GPU, got none)"
        advice = "type make plan on a machine that has it and shares this folder, or set BATCH_SIZE"
        raise PreflightError(Problem(what, "BATCH_SIZE", advice, code="gpu.missing"))
    if done.returncode:
        what = "the memory of a step could not be predicted"
        raise RunError(Problem(what, "BATCH_SIZE", code="process.failed"))
    limits: dict[str, Any] = json.loads(done.stdout)
    return limits


def run_predict(target: str, values: Any) -> subprocess.CompletedProcess[str]:
    """Run ``gpt2.memory.predict``, which imports torch, on configurations as symbol values."""
    return subprocess.run(
        python_module_command("gpt2.memory.predict", target),
        input=json.dumps(values),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
