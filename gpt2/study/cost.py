"""Expected time and memory of runs that are not done. Imports no torch."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.attention.backends import Place
from gpt2.config import Config
from gpt2.memory.micro_batch import run_predict
from gpt2.training.budget import run_budget
from lib.console import log
from lib.env import speed
from lib.env.gpu import find_gpu, peak_tflops
from lib.env.machine import worker_environment
from lib.errors import EXIT_PREFLIGHT, ConfigError, PreflightError, Problem, RunError
from lib.files import canonical_json
from lib.project import python_module_command
from lib.runner.ranks import run_ranks
from lib.units import format_duration

# Share of the data sheet's peak that a step of GPT-2 reaches in bf16. Measured: 0.13 to 0.37, on A100
# and H100, eager and compiled (docs/gpu.md).
GPU_SHARE = 0.25
# A probe that takes longer is ended: importing torch, compilation, steps and an evaluation.
_PROBE_SECONDS = 300.0


@dataclass(frozen=True)
class ProbedStep:
    """Times of a configuration, measured on this machine with no other run beside it.

    ``step_seconds`` is the median of ``timed_steps``, extrapolated if ``timed_micro_batches`` are
    fewer than those of a step; ``evaluation_seconds`` is the time of one evaluation.
    """

    device: str
    step_seconds: float
    timed_steps: int
    timed_micro_batches: int
    evaluation_seconds: float

    def run_seconds(self, config: Config) -> float:
        """Return the time of all steps and evaluations of a run with a budget in iterations."""
        steps = run_budget(config).iterations * self.step_seconds
        return steps + evaluations(config) * self.evaluation_seconds


@dataclass(frozen=True)
class RunEstimate:
    """Expected speed and memory of a run.

    ``source`` of the speed: runs (done runs of the plan), machine (matrix product of this CPU), gpu
    (a share of the peak of ``gpu``), probe, or unknown.
    """

    source: str = "unknown"
    # Model FLOPs per second of the run.
    flops_per_second: float | None = None
    # The GPU that the plan was asked for, and the tensors of a step on it at their peak.
    gpu: str = ""
    peak_bytes: int | None = None
    probe: ProbedStep | None = None
    # Why the run could not be probed.
    unmeasured: str = ""


def evaluations(config: Config) -> int:
    """Return the number of evaluations of a run with a budget in iterations: the final one, too."""
    interval, iterations = config.train.eval_interval, run_budget(config).iterations
    return 1 + (max(0, iterations - 1) // interval if interval else 0)


def estimates_from_runs(base: Config, speeds: Sequence[float], count: int) -> list[RunEstimate]:
    """Return one estimate for ``count`` runs, from the FLOP/s of done runs or of this CPU."""
    if speeds:
        return [RunEstimate("runs", statistics.median(speeds))] * count
    guess = speed.flops_per_second(base.machine)
    return [RunEstimate("unknown" if guess is None else "machine", guess)] * count


def estimates_on_gpu(configs: Sequence[Config], gpu: str) -> list[RunEstimate]:
    """Predict the memory of each run on ``gpu``, and its speed as a share of the peak.

    Raises ConfigError if the GPU or its peak is unknown, or cannot run a configured backend, and
    RunError if the process that predicts the memory fails.
    """
    name = find_gpu(gpu).name
    speeds = [_share_of_peak(config, name) for config in configs]
    keys = [canonical_json({**config.values, "SEED": 1}) for config in configs]
    values = {key: dict(config.values) for key, config in zip(keys, configs, strict=True)}
    done = run_predict(name, list(values.values()))
    if done.returncode:
        raise RunError(
            Problem(
                "the memory of a step could not be predicted", f"GPU={gpu}", code="process.failed"
            )
        )
    peaks = dict(zip(values, json.loads(done.stdout), strict=True))
    return [
        RunEstimate("gpu" if flops else "unknown", flops, name, peaks[key])
        for flops, key in zip(speeds, keys, strict=True)
    ]


def _share_of_peak(config: Config, gpu: str) -> float | None:
    """Return the FLOP/s of a run; None for attention that reaches less than the stated share."""
    model, machine = config.model, config.machine
    peak = peak_tflops(gpu, machine.precision, machine.matmul_precision)
    if peak is None:
        what = f"no known {machine.precision} peak of this GPU (expected another GPU or PRECISION)"
        raise ConfigError(Problem(what, f"GPU={gpu}", code="gpu.unknown-peak"))
    # Flash attention has the same requirement as the Triton kernels.
    place: Place = "gpu" if find_gpu(gpu).flash else "gpu without kernels"
    if not model.backends(place) <= {"sdpa", "triton"}:
        return None
    return GPU_SHARE * peak * 1e12 * config.train.gpus


def estimates_by_probe(runs: Sequence[tuple[str, Config]], build_dir: Path) -> list[RunEstimate]:
    """Time each distinct model of the labelled runs on this machine, one after the other.

    Raises PreflightError if this machine lacks the device of the configuration.
    """
    keys = [_probe_key(config) for _, config in runs]
    distinct: dict[str, tuple[str, Config]] = {}
    for key, run in zip(keys, runs, strict=True):
        distinct.setdefault(key, run)
    log("PROBE", f"{len(distinct)} models, each for some seconds after it is built")
    started, measured = time.monotonic(), dict[str, RunEstimate]()
    for count, (key, (label, config)) in enumerate(distinct.items(), 1):
        measured[key] = estimate = _probe(config, build_dir)
        left = (time.monotonic() - started) / count * (len(distinct) - count)
        text = estimate.unmeasured
        if estimate.probe:
            text = f"{1000 * estimate.probe.step_seconds:,.1f} ms a step"
        log("PROBE", f"{count}/{len(distinct)}   {label}: {text}   eta {format_duration(left)}")
    return [measured[key] for key in keys]


def _probe_key(config: Config) -> str:
    """Return all that decides the time of a step or of an evaluation; seeds and schedules do not."""
    batch = config.train.global_batch, config.train.batch_size, config.train.gpus
    parts = config.model, config.machine, config.numerics, config.optimizer, config.pruning
    return repr((parts, config.data, batch))


def _probe(config: Config, build_dir: Path) -> RunEstimate:
    """Time a configuration in a process of its own, or one for each of its ranks."""
    command = python_module_command("gpt2.running.probe", str(build_dir))
    variables = {**os.environ, **worker_environment(config.machine)}
    values = json.dumps(dict(config.values))
    try:
        code, output = run_ranks(command, variables, config.train.gpus, values, _PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return RunEstimate(unmeasured=f"not measured within {_PROBE_SECONDS:.0f} s")
    document: dict[str, Any] = json.loads(output or "{}")
    if code == EXIT_PREFLIGHT and "problem" in document:
        raise PreflightError(Problem(**document["problem"]))
    if code:
        problem = document.get("problem", {"what": f"the process failed with exit code {code}"})
        return RunEstimate(unmeasured=f"not measured: {problem['what']}")
    return RunEstimate("probe", probe=ProbedStep(**document))
