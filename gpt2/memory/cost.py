"""Time of a training step on a GPU, predicted from counted kernels; imports no torch.

A kernel takes the longest of three times: FLOPs at the device's rate of its kind, bytes at the
memory's rate, and the shortest time of any kernel. A step takes the sum over its kernels, or the
time in which the host launches them, whichever is longer.
"""

import dataclasses
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.config import Config
from lib.config.field import SymbolValue
from lib.env.gpu import find_gpu, peak_tflops
from lib.errors import ConfigError, Problem, RunError
from lib.files import canonical_json
from lib.json_files import read_json_object, typed
from lib.project import python_module_command
from lib.units import format_si, format_size

# Shares of the data sheet's peaks that large kernels reach, and the times of a launch. Assumed until
# ``make calibrate`` has measured them: products 0.6 to 0.75 on A100 and H100, flash attention with
# its backward pass 0.35 to 0.5 (Dao 2023, Shah et al. 2024), streaming kernels 0.75 to 0.9.
_PRODUCT_SHARE, _ATTENTION_SHARE, _BANDWIDTH_SHARE = 0.6, 0.35, 0.75
# 42 us a launch were measured beside an H100 with a slow processor.
_KERNEL_SECONDS, _LAUNCH_SECONDS = 3e-6, 20e-6
# File of the build folder with what ``make calibrate`` measured.
CALIBRATION = "calibration.json"
# A prediction without a measurement is right within this factor.
UNCOMPARED_MARGIN = 2.0


class Kernel(NamedTuple):
    """A launch: its kind, FLOPs, and bytes read and written.

    Kinds are ``memory``, and the types ``half`` and ``fp32`` of products, with the prefix
    ``attention-`` for an attention kernel.
    """

    kind: str
    flops: float
    bytes: float


class StepKernels(NamedTuple):
    """Kernels of a micro-batch and of the update (kernel → number), at the configured depth.

    ``casts`` are those of ``passes`` that cast weights to the autocast dtype: a step launches them
    in the first micro-batch only. ``forward`` and ``backward`` are those of one inner block in a
    micro-batch. ``reads`` are the reads of the device by the host in a micro-batch, for which the
    host waits.
    """

    passes: Mapping[Kernel, float]
    casts: Mapping[Kernel, float]
    update: Mapping[Kernel, float]
    forward: Mapping[Kernel, float]
    backward: Mapping[Kernel, float]
    reads: int
    update_reads: int


@dataclass(frozen=True)
class DeviceRates:
    """Rates that a device reaches.

    ``flops`` maps each kind of kernel to FLOP/s. ``launch_seconds`` is the time of the host per
    launch, ``kernel_seconds`` the shortest time of a kernel. ``factor`` is measured / predicted step
    time, 1.0 if no step was measured; ``margin`` is the factor within which predictions are right.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    kernel_seconds: float = _KERNEL_SECONDS
    launch_seconds: float = _LAUNCH_SECONDS
    factor: float = 1.0
    margin: float = UNCOMPARED_MARGIN
    # What the rates come from.
    source: str = "predicted, never compared with this card"

    def device_seconds(self, kernels: Mapping[Kernel, float]) -> float:
        """Return the time of ``kernels`` (kernel → number) on the device."""
        return sum(count * self._seconds(kernel) for kernel, count in kernels.items())

    def _seconds(self, kernel: Kernel) -> float:
        arithmetic = kernel.flops / self.flops[kernel.kind] if kernel.flops else 0.0
        return max(arithmetic, kernel.bytes / self.bytes_per_second, self.kernel_seconds)


@dataclass(frozen=True)
class StepPrediction:
    """Predicted optimizer step of one process.

    ``bound`` is "launches" if the host is slower than the device. ``launches`` and ``gigabytes``
    (read and written) are those of a step; those of a ``layer`` are of an inner block and one
    micro-batch. ``host_reads`` of a step make the host wait for the device. ``gpu`` is the name in
    the table, ``source`` that of the rates.
    """

    gpu: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    launches: int
    gigabytes: float
    peak_bytes: int
    bound: str
    margin: float
    source: str
    layer_forward_launches: int
    layer_backward_launches: int
    layer_gigabytes: float
    update_launches: int
    host_reads: int


def assumed_rates(gpu_name: str, precision: str, matmul_precision: str) -> DeviceRates:
    """Return the rates assumed of a GPU of the table, from its data sheet.

    Raises ConfigError if the GPU is unknown, or its peak in this precision.
    """
    gpu = find_gpu(gpu_name)
    half = peak_tflops(gpu.name, "fp16" if precision == "fp16" else "bf16", matmul_precision)
    fp32 = peak_tflops(gpu.name, "fp32", matmul_precision)
    if fp32 is None or (half is None and precision != "fp32"):
        what = f"no known {precision} peak of this GPU (expected another GPU or PRECISION)"
        raise ConfigError(Problem(what, f"GPU={gpu_name}", code="gpu.unknown-peak"))
    peaks = {"fp32": fp32 * 1e12, "half": (half or fp32) * 1e12}
    flops = {kind: _PRODUCT_SHARE * peak for kind, peak in peaks.items()}
    flops |= {f"attention-{kind}": _ATTENTION_SHARE * peak for kind, peak in peaks.items()}
    return DeviceRates(flops, _BANDWIDTH_SHARE * gpu.gbs * 1e9)


def rates(config: Config, gpu_name: str, build_dir: Path | None) -> DeviceRates:
    """Return the rates measured on this GPU if there is a calibration of it, else the assumed."""
    machine = config.machine
    assumed = assumed_rates(gpu_name, machine.precision, machine.matmul_precision)
    name = find_gpu(gpu_name).name
    stored = stored_calibrations(build_dir) if build_dir else {}
    if build_dir is None or name not in stored:
        return assumed
    return typed(DeviceRates, stored[name], build_dir / CALIBRATION, (name,))


def stored_calibrations(build_dir: Path) -> dict[str, Any]:
    """Return the calibrations of the build folder: GPU → fields of its DeviceRates.

    Raises DamagedRecord if the file cannot be read.
    """
    path = build_dir / CALIBRATION
    return read_json_object(path) if path.exists() else {}


def predict_step(
    kernels: StepKernels,
    config: Config,
    rates: DeviceRates,
    gpu: str,
    peak: int,
) -> StepPrediction:
    """Predict a step from the kernels of a micro-batch and of the update.

    Gradient exchange between processes is not included.
    """
    train = config.train
    step: Counter[Kernel] = Counter()
    micro_batches = train.grad_accumulation
    parts = (kernels.passes, micro_batches), (kernels.casts, 1 - micro_batches), (kernels.update, 1)
    for part, times in parts:
        for kernel, count in part.items():
            step[kernel] += count * times  # type: ignore[assignment]  # counts may be fractions
    launches = _launches(step)
    device, host = rates.device_seconds(step), launches * rates.launch_seconds
    seconds = max(device, host) * rates.factor
    tokens = train.tokens_per_iteration(config.model.shape.block_size)
    machine = config.machine
    peak_flops = peak_tflops(gpu, machine.precision, machine.matmul_precision)
    speed = config.model.flops_per_token() * tokens / train.gpus / seconds
    return StepPrediction(
        gpu,
        seconds,
        tokens / seconds,
        speed / (peak_flops * 1e12) if peak_flops else None,
        launches,
        _gigabytes(step),
        peak,
        "launches" if host > device else "device",
        rates.margin,
        rates.source,
        _launches(kernels.forward),
        _launches(kernels.backward),
        _gigabytes(kernels.forward) + _gigabytes(kernels.backward),
        _launches(kernels.update),
        kernels.reads * train.grad_accumulation + kernels.update_reads,
    )


def _launches(kernels: Mapping[Kernel, float]) -> int:
    return round(sum(kernels.values()))


def _gigabytes(kernels: Mapping[Kernel, float]) -> float:
    return sum(kernel.bytes * count for kernel, count in kernels.items()) / 1e9


def predict_runs(
    configs: Sequence[Config], gpu: str, build_dir: Path | None
) -> list[StepPrediction | None]:
    """Predict a step of each configuration on ``gpu``, in a process that imports torch.

    None for attention whose GPU form cannot be counted on a CPU. Raises ConfigError if the GPU or its peak is unknown, RunError if the process fails.
    """
    for config in configs:
        rates(config, gpu, build_dir)
    # Seeds and output folders do not change a step; configurations of a study repeat.
    values: dict[str, dict[str, SymbolValue]] = {}
    keys = []
    for config in configs:
        keys.append(canonical_json({**config.values, "SEED": 1}))
        if config.model.attention.pattern.predicted:
            values.setdefault(keys[-1], dict(config.values))
    arguments = [gpu, *([str(build_dir)] if build_dir else [])]
    done = run_predict(arguments, list(values.values()))
    if done.returncode:
        raise RunError(
            Problem("the step could not be predicted", f"GPU={gpu}", code="process.failed")
        )
    predictions = dict(zip(values, json.loads(done.stdout), strict=True))
    return [StepPrediction(**predictions[key]) if key in predictions else None for key in keys]


def run_predict(arguments: Sequence[str], values: Any) -> subprocess.CompletedProcess[str]:
    """Run ``gpt2.memory.predict``, which imports torch, on configurations as symbol values."""
    return subprocess.run(
        python_module_command("gpt2.memory.predict", *arguments),
        input=json.dumps(values),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )


def to_json(predictions: Sequence[StepPrediction]) -> str:
    """Format predictions for ``predict_runs``."""
    return json.dumps([dataclasses.asdict(each) for each in predictions])


def prediction_columns(predictions: Sequence[StepPrediction | None]) -> dict[str, list[str]]:
    """Return the columns of a table of predicted steps; none if nothing was predicted."""
    if not any(predictions):
        return {}
    return {
        "step ms": [f"{p.seconds * 1000:,.0f}" if p else "-" for p in predictions],
        "tok/s": [format_si(p.tokens_per_second) if p else "-" for p in predictions],
        "MFU": [f"{p.mfu:.0%}" if p and p.mfu else "-" for p in predictions],
        "launches": [f"{p.launches:,}" if p else "-" for p in predictions],
        "memory": [_memory(p) if p else "-" for p in predictions],
        "GB": [f"{p.gigabytes:,.0f}" if p else "-" for p in predictions],
        "layer": [_layer(p) if p else "-" for p in predictions],
        "layer GB": [f"{p.layer_gigabytes:,.2f}" if p else "-" for p in predictions],
        "update": [f"{p.update_launches:,}" if p else "-" for p in predictions],
        "host reads": [f"{p.host_reads:,}" if p else "-" for p in predictions],
    }


def _memory(prediction: StepPrediction) -> str:
    fits = find_gpu(prediction.gpu).holds(prediction.peak_bytes)
    return f"{format_size(prediction.peak_bytes)}{'' if fits else ' (too large)'}"


def _layer(prediction: StepPrediction) -> str:
    return f"{prediction.layer_forward_launches:,} + {prediction.layer_backward_launches:,}"
