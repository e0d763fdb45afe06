"""Expected time and memory of runs that are not done. Imports no torch."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.attention.backends import Place
from gpt2.config import Config
from gpt2.memory.micro_batch import run_predict
from gpt2.running import PRELOADED_MODULES
from gpt2.training.budget import TrainingBudget
from lib.console import log
from lib.env import speed
from lib.env.gpu import find_gpu, peak_tflops
from lib.env.machine import worker_environment
from lib.errors import ConfigError, KablateError, PreflightError, Problem, RunError
from lib.files import canonical_json
from lib.runner.local import LocalExecutor
from lib.units import format_duration

# Share of the data sheet's peak that a step of GPT-2 reaches in bf16. Measured: 0.13 to 0.37, on A100
# and H100, eager and compiled (docs/gpu.md).
GPU_SHARE = 0.25
# A probe that takes longer is ended: importing torch, compilation, steps and an evaluation.
_PROBE_SECONDS = 300.0


# An estimate is a part of a row of the plan. Its ``seconds_from`` is runs (the done runs of the plan),
# machine (a matrix product of this CPU), gpu (a share of its peak), probe, or unknown;
# ``flops_per_second`` are model FLOPs of the run.
Estimate = dict[str, Any]


def evaluations(config: Config) -> int:
    """Return the number of evaluations of a run with a budget in iterations: the final one, too."""
    interval, iterations = config.train.eval_interval, TrainingBudget(config).iterations
    return 1 + (max(0, iterations - 1) // interval if interval else 0)


def estimated_speed(base: Config, speeds: Sequence[float]) -> Estimate:
    """Return the estimate of every run, from the FLOP/s of done runs or of this CPU."""
    if speeds:
        return {"seconds_from": "runs", "flops_per_second": statistics.median(speeds)}
    guess = speed.flops_per_second(base.machine)
    source = "unknown" if guess is None else "machine"
    return {"seconds_from": source, "flops_per_second": guess}


def estimated_on_gpu(configs: Sequence[Config], gpu: str) -> list[Estimate]:
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
        what = "the memory of a step could not be predicted"
        raise RunError(Problem(what, f"GPU={gpu}", code="process.failed"))
    peaks = dict(zip(values, json.loads(done.stdout), strict=True))
    return [
        {
            "seconds_from": "gpu" if flops else "unknown",
            "flops_per_second": flops,
            "gpu": name,
            "peak_bytes": peaks[key],
        }
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


def probed(labels: Sequence[str], configs: Sequence[Config], build_dir: Path) -> list[Estimate]:
    """Time each distinct model on this machine, one after the other, with no other run beside it.

    Raises PreflightError if this machine lacks the device of the configuration.
    """
    keys = [_probe_key(config) for config in configs]
    started, measured, models = time.monotonic(), dict[str, Estimate](), len(set(keys))
    log("PROBE", f"{models} models, each for some seconds after it is built")
    for key, label, config in zip(keys, labels, configs, strict=True):
        if key in measured:
            continue
        measured[key] = estimate = _probe(config, build_dir)
        text = estimate.get("unmeasured", "")
        if not text:
            text = f"{1000 * estimate['probe']['step_seconds']:,.1f} ms a step"
        count = len(measured)
        left = format_duration((time.monotonic() - started) / count * (models - count))
        log("PROBE", f"{count}/{models}   {label}: {text}   eta {left}")
    return [measured[key] for key in keys]


def _probe_key(config: Config) -> str:
    """Return all that decides the time of a step or of an evaluation; seeds and schedules do not."""
    batch = config.train.global_batch, config.train.batch_size, config.train.gpus
    parts = config.model, config.machine, config.numerics, config.optimizer, config.pruning
    return repr((parts, config.data, batch))


def _probe(config: Config, build_dir: Path) -> Estimate:
    """Time a configuration in a worker, or one for each of its ranks."""
    variables = worker_environment(config.machine)
    executor = LocalExecutor(PRELOADED_MODULES, variables)
    job = executor.submit_call(
        _in_worker, config, build_dir, world_size=config.train.gpus, environment=variables
    )
    try:
        return {"seconds_from": "probe", "probe": executor.result(job, _PROBE_SECONDS)}
    except PreflightError:
        raise
    except KablateError as error:
        reason = f"not measured: {error.problems[0].what}"
        return {"seconds_from": "unknown", "unmeasured": reason}


def _in_worker(config: Config, build_dir: Path) -> dict[str, Any]:
    from gpt2.running.probe import probe

    return probe(config, build_dir)
