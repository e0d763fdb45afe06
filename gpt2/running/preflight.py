"""Preflight of GPT-2 runs: the conditions for starting the first one, and their report.

Imports no torch: the checks of the device do, in a worker.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import open_dataset
from gpt2.data.prepare import prepare_dataset
from gpt2.model_config import ModelConfig
from gpt2.quantized.options import missing_package
from gpt2.training.budget import TrainingBudget
from gpt2.weights.match import weight_mismatches
from gpt2.weights.source import download_weights
from lib.console import log
from lib.env.gpu import gpu_groups, selected_gpus, usable_cores
from lib.env.packages import Interpreter, current_interpreter
from lib.env.preflight import (
    environment_problems,
    machine_problems,
    output_problems,
    pinned_gpu_problems,
    problems_of,
)
from lib.env.snapshot import FOLDER, refresh_snapshot
from lib.errors import ConfigError, KablateError, PreflightError, Problem, RunError
from lib.make_variables import variables_without_effect
from lib.runner.local import LocalExecutor
from lib.runs.code import describe_tree, git_state, uncommitted_problems
from lib.units import format_duration, format_si

# fp32 weights; a checkpoint adds Adam's two moments of the same size.
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
# Allowance per run for records, tables and file system overhead.
_MARGIN_BYTES = 1 << 20
# Threshold for a time budget, whose number of iterations is unknown.
LONG_SECONDS = 3600


def long_run_problems(config: Config) -> list[Problem]:
    """Return the problems that block a long run: no checkpoint, or accidental fp32 on a GPU.

    A run is long from ``LONG_RUN_ITERATIONS`` on, or with a time budget of an hour.
    """
    budget, train = TrainingBudget(config), config.train
    if budget.is_time and budget.seconds < LONG_SECONDS:
        return []
    if not budget.is_time and budget.iterations < train.long_run_iterations:
        return []
    problems, interval = [], train.checkpoint_interval
    if not interval or 0 < budget.iterations <= interval:
        what = f"CHECKPOINT_INTERVAL={interval} saves no checkpoint during {length(config)}"
        advice = "type: SET=CHECKPOINT_INTERVAL=500, or increase LONG_RUN_ITERATIONS"
        problems.append(Problem(what, "CHECKPOINT_INTERVAL", advice, code="long-run.no-checkpoint"))
    machine = config.machine
    if machine.device == "cuda" and machine.precision == "fp32" and not config.repro.strict:
        what = f"PRECISION=fp32 on a GPU with profile {config.repro.profile}, for {length(config)}"
        advice = "type: SET=PRECISION_BF16=y, or SET=RUN_PROFILE_PAPER_REPRO=y to require fp32"
        problems.append(Problem(what, "PRECISION", advice, code="long-run.fp32"))
    return problems


def length(config: Config) -> str:
    """Format the budget of a run: ``50,000 it``, or ``7,200 s``."""
    budget = TrainingBudget(config)
    return f"{budget.seconds:,.0f} s" if budget.is_time else f"{budget.iterations:,} it"


def intended(config: Config) -> str:
    """Summarize the planned training in one line."""
    shape, train, machine = config.model.shape, config.train, config.machine
    attention = config.model.attention
    interval = train.checkpoint_interval
    parts = [
        f"{format_si(config.model.num_params())} parameters",
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide",
        f"context {shape.block_size}",
        f"{attention.projection.name} {attention.pattern.name}",
        f"{attention.positions.name} positions",
        f"{machine.precision} on {machine.device}",
        f"{length(config)} x {format_si(train.tokens_per_iteration(shape.block_size))} tokens",
        f"{config.optimizer.name} {config.schedule.learning_rate:g}",
        f"checkpoint every {interval:,} it" if interval else "no checkpoint before the end",
    ]
    return ", ".join(parts)


SCHEMA_VERSION = 1
# A function that raises its problems as a KablateError, and its arguments.
KernelCheck = tuple[Callable[..., None], *tuple[Any, ...]]


@dataclass(frozen=True)
class TrainingPlace:
    """Build and results folders of a training, and whether uncommitted code is allowed."""

    build_dir: Path
    # Folder of the study's runs; it may be missing.
    results: Path
    # Allow uncommitted code.
    dirty: bool = False
    # Bytes of the runs to be resumed that are written already.
    written_bytes: int = 0


def check_machine(
    configs: Sequence[Config], place: TrainingPlace, jobs: int = 0
) -> list[dict[str, str]]:
    """Check all conditions of ``configs``, in a worker because it imports torch.

    ``jobs`` is the requested number of concurrent runs, 0 for as many as fit. Returns the environment
    variables of each slot, one slot per run that fits at a time. Raises PreflightError with all
    problems.
    """
    # Before this process uses a GPU itself.
    busy = _busy_gpus(configs)
    checked = conditions(configs, place, jobs, busy)
    if problems := [p for problems in checked.values() for p in problems]:
        raise PreflightError(*dict.fromkeys(problems))
    if ignored := variables_without_effect(configs[0].values, os.environ):
        log("ENV", f"without effect: {', '.join(ignored)}; symbols are set by SET=NAME=VALUE")
    if text := describe_tree():
        known = git_state()["git_sha"] is not None
        saved = "the diff is saved" if known else "neither commit nor diff is saved"
        log("DIRTY", f"{text}; {saved} with each run")
    if busy:
        log("GPU", f"not used, because other programs use them: {', '.join(busy.values())}")
    slots = _slots(configs, busy)
    if slots != [{}] * len(slots):
        size = max(config.train.gpus for config in configs)
        log("GPU", f"{len(slots)} group(s) of GPUS={size}: {jobs or len(slots)} runs at a time")
    return slots


def conditions(
    configs: Sequence[Config], place: TrainingPlace, jobs: int = 0, busy: Mapping[int, str] = {}
) -> dict[str, list[Problem]]:
    """Return condition → its problems; each is checked, so that no problem hides another.

    ``busy`` are the GPUs that other programs use, by their index, with a description. Writes the
    environment snapshot if the environment is the right one.
    """
    here, checked = current_interpreter(), dict[str, list[Problem]]()
    for environment in dict.fromkeys(c.environment for c in configs):
        for name, problems in environment_problems(environment, here, place.results).items():
            checked[name] = checked.get(name, []) + problems
    bases = dict.fromkeys(part.base for c in configs for part in c.model.adapters)
    checked["packages"] = checked["packages"] + missing_package(bases, "LORA_BASE")
    profiles = dict.fromkeys(c.repro.profile for c in configs)
    checked["committed"] = [p for each in profiles for p in uncommitted_problems(each, place.dirty)]
    machines = dict.fromkeys((c.machine, c.train.gpus) for c in configs)
    checked["device"] = [p for machine, n in machines for p in machine_problems(machine, n)]
    if not checked["device"]:
        pinned = dict.fromkeys((c.environment.gpu_pinned, c.train.gpus) for c in configs)
        checked["device"] = [p for is_on, n in pinned for p in pinned_gpu_problems(is_on, n)]
    # The snapshot runs programs of the environment.
    if not checked["environment"]:
        checked["snapshot"] = _snapshot_problems(configs, place.build_dir / FOLDER, here)
    checked["trackers"] = [p for c in configs for p in c.tracking.missing_packages()]
    checked["long runs"] = list(dict.fromkeys(p for c in configs for p in long_run_problems(c)))
    slots: Sequence[Mapping[str, str]] = [{}]
    # Kernels are launched on the device.
    if not checked["device"]:
        checked["kernels"] = _kernel_problems(configs)
        slots = _slots(configs, busy)
    size = max(config.train.gpus for config in configs)
    what = f"no group of GPUS={size} free GPUs (in use: {', '.join(busy.values()) or 'none'})"
    advice = "wait, or name the GPUs to use: CUDA_VISIBLE_DEVICES=0 make"
    none = Problem(what, "GPUS", advice, code="gpu.busy")
    checked["free GPUs"] = [] if slots else [none]
    needed = bytes_needed(configs, jobs or max(1, len(slots))) - place.written_bytes
    checked["output folder"] = output_problems(place.results, max(0, needed))
    return checked


def _snapshot_problems(configs: Sequence[Config], folder: Path, here: Interpreter) -> list[Problem]:
    """Write the environment and hardware snapshots; return the problems of doing so."""
    import torch

    from lib.env.hardware import probe_hardware

    recorded = [c for c in configs if c.environment.snapshot]
    problems: list[Problem] = []
    for environment in dict.fromkeys(c.environment for c in recorded):
        problems += problems_of(refresh_snapshot, folder, environment, here)
    if recorded:
        on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in recorded)
        problems += problems_of(probe_hardware, folder, torch.device("cuda" if on_gpu else "cpu"))
    return problems


def describe(configs: Sequence[Config], place: TrainingPlace) -> dict[str, Any]:
    """Return the report of ``make preflight``: facts about this machine, and every condition.

    On a login node without a GPU, the conditions of the GPU are not tested.
    """
    import torch

    from lib.env.hardware import describe_hardware

    busy = _busy_gpus(configs)
    here, code = current_interpreter(), git_state()
    on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in configs)
    hardware = describe_hardware(place.results, torch.device("cuda" if on_gpu else "cpu"))
    checked, untested = conditions(configs, place, busy=busy), ""
    missing = [p for problems in checked.values() for p in problems if p.code == "gpu.missing"]
    # On a login node, variables configure SLURM. That sbatch is installed says nothing: a workstation
    # has it too.
    configured = any(name.startswith(("SLURM_", "SBATCH_")) for name in os.environ)
    if missing and configured and "SLURM_JOB_ID" not in os.environ:
        untested = _UNTESTED
        of_gpu = {name: checked.pop(name, []) for name in _OF_GPU}
        checked |= {name: [p for p in each if p not in missing] for name, each in of_gpu.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": list(dict.fromkeys(intended(c) for c in configs)),
        "facts": {
            "interpreter": here.program,
            "environment": f"{here.kind} {here.name}",
            "python": here.python,
            "torch": str(torch.__version__),
            "cuda_available": torch.cuda.is_available(),
            **{name: value for name, value in hardware.items() if name != "schema_version"},
            **code,
            "run_profiles": sorted({c.repro.profile for c in configs}),
            "env_policies": sorted({c.environment.policy for c in configs}),
            "snapshot": str(place.build_dir / FOLDER),
            "variables_without_effect": variables_without_effect(configs[0].values, os.environ),
        },
        "conditions": [
            {
                "name": name,
                "problems": [dataclasses.asdict(p) for p in problems],
                "untested": untested if name in _OF_GPU else "",
            }
            for name, problems in checked.items()
        ],
        "passed": not any(checked.values()),
    }


# Conditions that each worker tests on its node, before its first run.
_OF_GPU = ("device", "kernels", "free GPUs")
_UNTESTED = "not tested: no GPU here; each worker of make slurm tests it"


def describe_text(report: Mapping[str, Any]) -> str:
    """Format the report of ``describe``: one line per run, fact, problem, and met condition."""
    lines = [f"RUN     {text}" for text in report["runs"]]
    lines += [f"FACT    {name:24} {_format(value)}" for name, value in report["facts"].items()]
    for condition in report["conditions"]:
        problems = [Problem(**fields) for fields in condition["problems"]]
        lines += [f"FAIL    {condition['name']:18} {problem}" for problem in problems]
        if reason := condition["untested"]:
            lines.append(f"SKIP    {condition['name']:18} {reason}")
        elif not problems:
            lines.append(f"OK      {condition['name']}")
    return "\n".join(lines) + "\n"


def check_weights(configs: Sequence[Config], build_dir: Path) -> None:
    """Fetch missing weights of ``INIT_FROM``, and compare them with the models.

    Raises ConfigError with all mismatches, PreflightError if the weights are not available.
    """
    problems: list[Problem] = []
    for config in {(c.init, c.data, c.model): c for c in configs}.values():
        if config.init.init_from:
            problems += weight_mismatches(download_weights(config, build_dir), config.model)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def check_data(configs: Sequence[Config], build_dir: Path) -> None:
    """Prepare missing data sets, and verify every byte of each. Raises PreflightError."""
    problems: list[Problem] = []
    for data in dict.fromkeys(config.data for config in configs):
        try:
            prepare_dataset(data, build_dir)
            open_dataset(data, build_dir)
        except KablateError as error:
            problems.extend(error.problems)
    if problems:
        raise PreflightError(*dict.fromkeys(problems))


def gpu_name() -> str:
    """Return the model of the first visible GPU. Raises PreflightError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise PreflightError(Problem("no GPU is available", code="gpu.missing"))
    return torch.cuda.get_device_name(0)


def bytes_needed(configs: Sequence[Config], jobs: int) -> int:
    """Return the disk space for all final weights and the checkpoints of ``jobs`` runs."""
    weights = [config.model.num_params() * _BYTES_PER_PARAMETER for config in configs]
    # Plus one: the oldest checkpoint is deleted after the new one has been verified.
    checkpoints = max(config.train.checkpoint_keep + 1 for config in configs)
    largest = sorted(weights)[-jobs:]
    checkpoint_bytes = _CHECKPOINT_COPIES * checkpoints * sum(largest)
    return sum(weights) + checkpoint_bytes + _MARGIN_BYTES * len(configs)


def _kernel_problems(configs: Sequence[Config]) -> list[Problem]:
    from gpt2.running.kernel_checks import check_attention, check_loss

    different = {(*_compared(c.model), c.machine): c for c in configs}
    processes = usable_cores() if len(different) > 1 else 1
    checks = [(check_attention, c.model, c.machine) for c in different.values()]
    if processes > 1:
        # At the same time, so that Triton's cache has the kernels without dropout.
        checks += [
            (check_attention, replace(model, shape=replace(model.shape, dropout=0.0)), machine)
            for model, machine in ((c.model, c.machine) for c in different.values())
            if machine.device == "cuda"
            and model.shape.dropout
            and "triton" in model.backends("gpu")
        ]
    # The kernel of the loss depends on the vocabulary and the z-loss alone.
    losses = {
        (c.model.shape.vocab_size, c.model.loss_backend, c.model.z_loss, c.machine): c
        for c in configs
    }
    checks += [(check_loss, c.model, c.machine) for c in losses.values()]
    if all(config.machine.device == "cpu" for config in configs):
        return [p for check in checks for p in problems_of(*check)]
    return compare_kernels(checks, processes)


def _compared(model: ModelConfig) -> tuple[Hashable, ...]:
    """Return what the comparison of attention depends on; of the projection, these are the heads."""
    attention = model.attention
    parts = attention.pattern, attention.terms, attention.gates, attention.sinks, attention.backend
    return *parts, attention.projection.kv_heads(model.shape), model.shape, model.reads_weights


def compare_kernels(checks: Sequence[KernelCheck], processes: int) -> list[Problem]:
    """Return the problems of all checks; several ``processes`` compile kernels side by side."""
    started, numbered = time.monotonic(), list(enumerate(checks))
    processes = min(processes, len(checks))
    found: dict[int, list[Problem]] = {}
    log("CHECK", f"kernels: {len(checks)} comparisons on the GPU, {processes} at a time")
    results = run_checks(numbered)
    if processes > 1:
        executor = LocalExecutor(["gpt2.running.kernel_checks"], {})
        parts = (numbered[i::processes] for i in range(processes))
        results = executor.results([executor.submit_call(run_checks, part) for part in parts])
    try:
        for number, problems in results:
            found[number] = problems
            left = (time.monotonic() - started) * (len(checks) / len(found) - 1)
            log("CHECK", f"kernels {len(found)} of {len(checks)}, eta {format_duration(left)}")
    except RunError as error:
        return list(error.problems)
    # A GPU in exclusive mode refuses a second process.
    for number, problems in found.items() if processes > 1 else ():
        if any(problem.code == "gpu.unsupported" for problem in problems):
            found[number] = problems_of(*checks[number])
    return [problem for number in sorted(found) for problem in found[number]]


def run_checks(
    checks: Sequence[tuple[int, KernelCheck]],
) -> Iterator[tuple[int, list[Problem]]]:
    for number, check in checks:
        yield number, problems_of(*check)


def _format(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format, value)) or "none"
    if isinstance(value, dict):
        return " ".join(map(_format, value.values()))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


# A GPU with more memory in use before this program starts is left to the program that uses it. A
# driver reserves up to about 1 GiB, a desktop uses as much.
_BUSY_MIB = 2048


def _busy_gpus(configs: Sequence[Config]) -> dict[int, str]:
    """Return the GPUs that other programs use, unless the user or a batch system selected GPUs.

    The key is the index, the value a description with index and memory.
    """
    if all(config.machine.device == "cpu" for config in configs):
        return {}
    import torch

    rocm = torch.version.hip is not None
    if selected_gpus(rocm) or not torch.cuda.device_count():
        return {}
    from lib.tracking.telemetry import read_gpus

    try:
        readings = read_gpus(torch.cuda.device_count(), rocm=rocm)
    except OSError as error:
        log("WARN", f"unknown whether other programs use the GPUs: {error}")
        return {}
    used = {r["index"]: r["memory_used_mib"] or 0 for r in readings}
    return {n: f"GPU {n} ({mib / 1024:.1f} GiB)" for n, mib in used.items() if mib > _BUSY_MIB}


def _slots(configs: Sequence[Config], busy: Mapping[int, str]) -> list[dict[str, str]]:
    """Return one slot per group of ``GPUS`` GPUs, or per ``GPUS`` x ``CPU_THREADS`` CPU cores."""
    if all(config.machine.device == "cpu" for config in configs):
        threads = max(config.machine.cpu_threads * config.train.gpus for config in configs)
        return [{}] * max(1, usable_cores() // threads)
    import torch

    size = max(config.train.gpus for config in configs)
    rocm = torch.version.hip is not None
    return gpu_groups(torch.cuda.device_count(), size, rocm, busy=busy)
