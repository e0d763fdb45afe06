"""Preflight: checks of machine, environment, initial weights and data before a plan is trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.prepare import prepare
from gpt2.data.store import open_dataset
from gpt2.long_runs import intended, long_run_problems
from gpt2.weights.source import fetch, mismatches
from lib.console import say
from lib.environment import policy
from lib.environment.detect import running
from lib.environment.snapshot import FOLDER, refresh_snapshot
from lib.environment.tree import describe_tree, tree_problems
from lib.errors import ConfigError, KablateError, PreflightError, Problem
from lib.machine.devices import gpu_groups, usable_cores
from lib.machine.setup import preflight
from lib.repro.source import commit, git_state
from lib.runner.preflight import output_problems

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


def check_machine(configs: Sequence[Config], place: TrainingPlace) -> list[dict[str, str]]:
    """Check the machine and the environment of ``configs``, and write the environment snapshot.

    Called in a worker because it imports torch. Returns the environment variables of each slot, one
    slot per concurrent run. Raises PreflightError with all problems.
    """
    problems = [p for condition in conditions(configs, place) for p in condition.problems]
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    if text := describe_tree(commit()):
        say("DIRTY", f"{text}; the diff is saved with each run")
    return _slots(configs)


def conditions(configs: Sequence[Config], place: TrainingPlace) -> list[Condition]:
    """Check every condition separately, so that no problem hides another."""
    here = running()
    profiles = {c.repro.profile for c in configs}
    results = [
        Condition(name, [p for e in {c.environment: None for c in configs} for p in check(e)])
        for name, check in (
            ("environment", lambda e: policy.environment_problems(e, here)),
            ("python", lambda e: policy.python_problems(e, here)),
            ("packages", lambda e: policy.package_problems()),
            ("foreign tools", policy.foreign_problems),
            ("lock file", policy.lock_problems),
            ("disk", lambda e: policy.disk_problems(e, place.results)),
        )
    ]
    trackers = [p for c in configs for p in c.tracking.missing_packages()]
    committed = [p for name in profiles for p in tree_problems(name, place.dirty)]
    long = [p for c in configs for p in long_run_problems(c)]
    device = _device_problems(configs)
    results += [
        Condition("trackers", trackers),
        Condition("committed", committed),
        Condition("long runs", list(dict.fromkeys(long))),
        Condition("device", device),
    ]
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

    from lib.environment.hardware import describe_hardware

    here, code = running(), git_state()
    on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in configs)
    hardware = describe_hardware(place.results, torch.device("cuda" if on_gpu else "cpu"))
    checked = conditions(configs, place)
    # The runner repeats this check with the disk space that its runs require.
    checked.append(Condition("output folder", output_problems(place.results, 0)))
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
            problems += mismatches(fetch(config, build_dir), config.model)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def check_data(configs: Sequence[Config], build_dir: Path) -> None:
    """Prepare missing data sets of ``configs``, and verify every byte of each data set once.

    Raises PreflightError with all problems.
    """
    problems: list[Problem] = []
    for data, vocab_size in {(c.data, c.model.shape.vocab_size): None for c in configs}:
        try:
            prepare(data, build_dir)
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


def _device_problems(configs: Sequence[Config]) -> list[Problem]:
    """Return unsupported device settings, and GPUs that a run would leave unused."""
    from lib.environment.hardware import gpu_problems

    problems: list[Problem] = []
    for machine, gpus in {(c.machine, c.train.gpus): None for c in configs}:
        problems += _problems(preflight, machine, gpus)
    if not problems:
        for pinned, gpus in {(c.environment.gpu_pinned, c.train.gpus): None for c in configs}:
            problems += gpu_problems(pinned, gpus)
    return problems


def _kernel_problems(configs: Sequence[Config]) -> list[Problem]:
    from gpt2.attention.preflight import check_attention

    models = {(c.model, c.machine): None for c in configs}
    return [p for model, machine in models for p in _problems(check_attention, model, machine)]


def _snapshot_problems(configs: Sequence[Config], place: TrainingPlace) -> list[Problem]:
    """Write the environment and hardware snapshots; return the problems of doing so."""
    import torch

    from lib.environment.hardware import probe_hardware

    folder = place.build_dir / FOLDER
    recorded = [c for c in configs if c.environment.snapshot]
    problems: list[Problem] = []
    for environment in {c.environment: None for c in recorded}:
        problems += _problems(refresh_snapshot, folder, environment, running())
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
