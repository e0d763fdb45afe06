"""The result of one run, read from its directory, or the reason that there is no result."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lib.analysis.machine import machine_figures
from lib.audit.contract import broken_contract
from lib.compare.facts import Facts, read_facts
from lib.errors import ConfigError
from lib.files import canonical_json
from lib.plan import Run
from lib.rundir import RunDir
from lib.status import State, read_status


@dataclass(frozen=True)
class Result:
    """Figures of a finished run. Losses are in nats per token."""

    run: Run[Any]
    val_loss: float
    unigram_entropy: float
    parameters: int
    tokens: int
    iterations: int
    train_seconds: float
    tokens_per_second: float
    # Fraction of the prunable weights that is zero.
    sparsity: float
    # Sparsity by layer: matrices are grouped by their name up to the first number.
    sparsity_by_layer: Mapping[str, float]
    # Speed, memory and utilisation by name.
    machine: Mapping[str, float]
    # Facts that two runs must share to be compared.
    facts: Facts


@dataclass(frozen=True)
class Hole:
    """A planned run without a result, and the reason."""

    run: Run[Any]
    state: str
    reason: str = ""


def read_result(run: Run[Any]) -> Result | Hole:
    """Return the figures of a run with status SUCCESS; a hole for any other status or damaged
    files.
    """
    directory = RunDir(run.path)
    status = read_status(directory)
    if status is None:
        return Hole(run, "not started")
    if status.state is not State.SUCCESS:
        return Hole(run, status.state.lower(), status.message.split("\n")[0])
    if findings := broken_contract(directory, every_byte=False):
        return Hole(run, State.INVALID.lower(), str(findings[0]))
    try:
        identity = json.loads(directory.resolved_config.read_text())["identity"]
        if canonical_json(identity) != canonical_json(run.config.identity()):
            return Hole(run, "not comparable", "identity differs from the planned run")
        summary = json.loads(directory.summary.read_text())
        return _result(run, summary["final"], summary["timing"], read_facts(directory))
    except ConfigError as error:
        return Hole(run, State.INVALID.lower(), error.problems[0].what)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Hole(run, State.INVALID.lower(), f"{type(error).__name__}: {error}")


def _result(run: Run[Any], final: dict[str, Any], timing: dict[str, Any], facts: Facts) -> Result:
    return Result(
        run=run,
        val_loss=float(final["val_loss"]),
        unigram_entropy=float(final["unigram_entropy"]),
        parameters=int(final["parameters"]),
        tokens=int(final["tokens"]),
        iterations=int(final["iterations"]),
        train_seconds=float(timing["train_seconds"]),
        tokens_per_second=float(timing["tokens_per_second"]),
        sparsity=float(final["sparsity"]),
        sparsity_by_layer=_by_layer(final["sparsity_by_layer"], final["prunable_weights"]),
        machine=machine_figures(RunDir(run.path), float(timing["tokens_per_second"])),
        facts=facts,
    )


def _by_layer(shares: Mapping[str, float], weights: Mapping[str, int]) -> dict[str, float]:
    """Return the fraction of zeros in each layer from the matrices' fractions and sizes."""
    zeros, sizes = Counter[str](), Counter[str]()
    for name, share in shares.items():
        # h.3.attn.c_attn.weight belongs to layer h.3, wte.weight to wte.
        match = re.match(r".*?\d+(?=\.)", name)
        layer = match[0] if match else name.rpartition(".")[0]
        zeros[layer] += share * weights[name]
        sizes[layer] += weights[name]
    return {layer: zeros[layer] / size for layer, size in sizes.items()}
