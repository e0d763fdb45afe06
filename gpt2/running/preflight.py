"""Extra launch checks and a one-line summary for long runs, where a mistake costs hours."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.data.store import open_dataset
from gpt2.training.budget import run_budget
from gpt2.weights.source import download_weights, weight_mismatches
from lib.console import format_si, log
from lib.env import preflight
from lib.env.gpu import gpu_groups, usable_cores
from lib.env.machine import preflight as machine_preflight
from lib.env.packages import current_interpreter
from lib.env.snapshot import FOLDER, refresh_snapshot
from lib.errors import ConfigError, KablateError, PreflightError, Problem
from lib.runs.code import describe_tree, git_state, head_commit, uncommitted_problems

# fp32 weights; a checkpoint adds Adam's two moments of the same size.
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
# Allowance per run for records, tables and file system overhead.
_MARGIN_BYTES = 1 << 20
# Threshold for a time budget, whose number of iterations is unknown.
LONG_SECONDS = 3600


def is_long(config: Config) -> bool:
    """Return whether the run has ``LONG_RUN_ITERATIONS`` or more, or a time budget of an hour."""
    budget = run_budget(config)
    if budget.is_time:
        return budget.seconds >= LONG_SECONDS
    return budget.iterations >= config.train.long_run_iterations


def long_run_problems(config: Config) -> list[Problem]:
    """Return the problems that block a long run: no checkpoint, or accidental fp32 on a GPU.

    Strict profiles such as paper_repro use fp32 deliberately and are exempt.
    """
    if not is_long(config):
        return []
    problems, interval = [], config.train.checkpoint_interval
    iterations = run_budget(config).iterations
    if not interval or 0 < iterations <= interval:
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
    budget = run_budget(config)
    return f"{budget.seconds:,.0f} s" if budget.is_time else f"{budget.iterations:,} it"


def intended(config: Config) -> str:
    """Summarize the planned training in one line, to be reviewed before a long run starts."""
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


# Preflight: checks of machine, environment, initial weights and data before a plan is trained.


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TrainingPlace:
    """Build and results folders of a training, and whether uncommitted code is allowed."""

    build_dir: Path
    # Folder of the study's runs; it may be missing.
    results: Path
    # Allow uncommitted code.
    dirty: bool = False


@dataclass(frozen=True)
class Condition:
    """A requirement for starting the first run, and the problems that violate it."""

    name: str
    problems: Sequence[Problem]


def check_machine(
    configs: Sequence[Config], place: TrainingPlace, jobs: int = 0
) -> list[dict[str, str]]:
    """Check the machine and the environment of ``configs``, and write the environment snapshot.

    Called in a worker because it imports torch. ``jobs`` is the requested number of concurrent runs,
    0 for as many as fit. Returns the environment variables of each slot, one slot per run that fits
    at a time. Raises PreflightError with all problems.
    """
    problems = [p for condition in conditions(configs, place, jobs) for p in condition.problems]
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    if text := describe_tree(head_commit()):
        log("DIRTY", f"{text}; the diff is saved with each run")
    return _slots(configs)


def conditions(configs: Sequence[Config], place: TrainingPlace, jobs: int = 0) -> list[Condition]:
    """Check every condition separately, so that no problem hides another."""
    here = current_interpreter()
    profiles = {c.repro.profile for c in configs}
    results = [
        Condition(name, [p for e in {c.environment: None for c in configs} for p in check(e)])
        for name, check in (
            ("environment", lambda e: preflight.environment_problems(e, here)),
            ("python", lambda e: preflight.python_problems(e, here)),
            ("packages", lambda e: preflight.package_problems()),
            ("foreign tools", preflight.foreign_problems),
            ("lock file", preflight.lock_problems),
            ("disk", lambda e: preflight.disk_problems(e, place.results)),
        )
    ]
    trackers = [p for c in configs for p in c.tracking.missing_packages()]
    committed = [p for name in profiles for p in uncommitted_problems(name, place.dirty)]
    long = [p for c in configs for p in long_run_problems(c)]
    device = _device_problems(configs)
    results += [
        Condition("trackers", trackers),
        Condition("committed", committed),
        Condition("long runs", list(dict.fromkeys(long))),
        Condition("device", device),
    ]
    jobs = jobs or (1 if device else len(_slots(configs)))
    output = preflight.output_problems(place.results, bytes_needed(configs, jobs))
    results.append(Condition("output folder", output))
    # Kernels are launched on the device.
    if not device:
        results.append(Condition("kernels", _kernel_problems(configs)))
    # The snapshot runs tools of the environment, so the environment must be the right one.
    if not results[0].problems:
        results.append(Condition("snapshot", _snapshot_problems(configs, place)))
    return results


def describe(configs: Sequence[Config], place: TrainingPlace) -> dict[str, Any]:
    """Return the report of ``make preflight``: facts about this machine, and every condition.

    Writes the environment snapshot; does not train or download anything.
    """
    import torch

    from lib.env.hardware import describe_hardware

    here, code = current_interpreter(), git_state()
    on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in configs)
    hardware = describe_hardware(place.results, torch.device("cuda" if on_gpu else "cpu"))
    checked = conditions(configs, place)
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
        },
        "conditions": [
            {"name": c.name, "problems": [dataclasses.asdict(p) for p in c.problems]}
            for c in checked
        ],
        "passed": not any(c.problems for c in checked),
    }


def describe_text(report: Mapping[str, Any]) -> str:
    """Format the report of ``describe``: one line per run, fact, problem, and met condition."""
    lines = [f"RUN     {text}" for text in report["runs"]]
    lines += [f"FACT    {name:18} {_format(value)}" for name, value in report["facts"].items()]
    for condition in report["conditions"]:
        problems = [Problem(**fields) for fields in condition["problems"]]
        lines += [f"FAIL    {condition['name']:18} {problem}" for problem in problems]
        lines += [] if problems else [f"OK      {condition['name']}"]
    return "\n".join(lines) + "\n"


def check_weights(configs: Sequence[Config], build_dir: Path) -> None:
    """Fetch the weights that ``INIT_FROM`` names if missing, and compare them with the models.

    Raises ConfigError with all mismatches, PreflightError if the weights are not available.
    """
    problems: list[Problem] = []
    for config in {(c.init, c.data, c.model): c for c in configs}.values():
        if config.init.init_from:
            problems += weight_mismatches(download_weights(config, build_dir), config.model)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def check_data(configs: Sequence[Config], build_dir: Path) -> None:
    """Prepare missing data sets of ``configs``, and verify every byte of each data set once.

    Raises PreflightError with all problems.
    """
    problems: list[Problem] = []
    for data, vocab_size in {(c.data, c.model.shape.vocab_size): None for c in configs}:
        try:
            prepare_dataset(data, build_dir)
            open_dataset(data, build_dir, vocab_size)
        except KablateError as error:
            problems.extend(error.problems)
    if problems:
        raise PreflightError(*dict.fromkeys(problems))


def gpu_name() -> str:
    """Return the model name of the first visible GPU. Raises PreflightError if there is none."""
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


def _device_problems(configs: Sequence[Config]) -> list[Problem]:
    """Return unsupported device settings, and GPUs that a run would leave unused."""
    from lib.env.hardware import gpu_problems

    problems: list[Problem] = []
    for machine, gpus in {(c.machine, c.train.gpus): None for c in configs}:
        problems += _problems(machine_preflight, machine, gpus)
    if not problems:
        for pinned, gpus in {(c.environment.gpu_pinned, c.train.gpus): None for c in configs}:
            problems += gpu_problems(pinned, gpus)
    return problems


def _kernel_problems(configs: Sequence[Config]) -> list[Problem]:
    from gpt2.attention.sdpa import check_attention

    models = {(c.model, c.machine): None for c in configs}
    return [p for model, machine in models for p in _problems(check_attention, model, machine)]


def _snapshot_problems(configs: Sequence[Config], place: TrainingPlace) -> list[Problem]:
    """Write the environment and hardware snapshots; return the problems of doing so."""
    import torch

    from lib.env.hardware import probe_hardware

    folder = place.build_dir / FOLDER
    recorded = [c for c in configs if c.environment.snapshot]
    problems: list[Problem] = []
    for environment in {c.environment: None for c in recorded}:
        problems += _problems(refresh_snapshot, folder, environment, current_interpreter())
    if recorded:
        on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in recorded)
        problems += _problems(probe_hardware, folder, torch.device("cuda" if on_gpu else "cpu"))
    return problems


def _format(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format, value)) or "none"
    if isinstance(value, dict):
        return " ".join(map(_format, value.values()))
    return {None: "none", True: "yes", False: "no"}.get(value, str(value))


def _problems(check: Callable[..., object], *arguments: object) -> list[Problem]:
    """Return the problems of the error that ``check`` raises."""
    try:
        check(*arguments)
    except KablateError as error:
        return list(error.problems)
    return []


def _slots(configs: Sequence[Config]) -> list[dict[str, str]]:
    """Return one slot per group of ``GPUS`` GPUs, or per ``GPUS`` x ``CPU_THREADS`` CPU cores."""
    if all(config.machine.device == "cpu" for config in configs):
        threads = max(config.machine.cpu_threads * config.train.gpus for config in configs)
        return [{}] * max(1, usable_cores() // threads)
    import torch

    size = max(config.train.gpus for config in configs)
    return gpu_groups(torch.cuda.device_count(), size, rocm=torch.version.hip is not None)
