"""Whether this machine can train a plan's runs, in this environment, and whether their data is as it
was made."""

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
    """Where runs are made, and what the user allows there."""

    build_dir: Path
    # Of the study's runs; it need not exist.
    results: Path
    # Train code that is not committed.
    dirty: bool = False


@dataclass(frozen=True)
class Condition:
    """Something that has to hold before the first run starts, and why it does not."""

    name: str
    problems: Sequence[Problem]


def check_machine(configs: Sequence[Config], place: TrainingPlace) -> list[dict[str, str]]:
    """Check the machine and the environment of ``configs``; called in a worker, for it loads torch.

    Writes the snapshot of the environment. One set of environment variables for each run that may
    train at a time. PreflightError with all problems at once.
    """
    problems = [p for condition in conditions(configs, place) for p in condition.problems]
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    if words := describe_tree(commit()):
        say("DIRTY", f"{words}; the difference is kept beside each run")
    return _slots(configs)


def conditions(configs: Sequence[Config], place: TrainingPlace) -> list[Condition]:
    """Every condition of a start, looked at one by one: none hides another."""
    here = running()
    profiles = {c.repro.profile for c in configs}
    found = [
        Condition(name, [p for e in {c.environment: None for c in configs} for p in ask(e)])
        for name, ask in (
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
    found += [
        Condition("trackers", trackers),
        Condition("committed", committed),
        Condition("long runs", list(dict.fromkeys(long))),
        Condition("device", device),
    ]
    # Kernels are tried on the device.
    if not device:
        found.append(Condition("kernels", _kernel_problems(configs)))
    # It asks the tools of an environment that is the right one.
    if not found[0].problems:
        found.append(Condition("snapshot", _snapshot_problems(configs, place)))
    return found


def describe(configs: Sequence[Config], place: TrainingPlace) -> dict[str, Any]:
    """What ``make preflight`` tells: facts of this machine, and every condition.

    Writes the snapshot of the environment; trains nothing and downloads nothing.
    """
    import torch

    from lib.environment.hardware import describe_hardware

    here, code = running(), git_state()
    on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in configs)
    found = describe_hardware(place.results, torch.device("cuda" if on_gpu else "cpu"))
    examined = conditions(configs, place)
    # The runner asks it too, with the sizes of what it is about to train.
    examined.append(Condition("output folder", output_problems(place.results, 0)))
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": list(dict.fromkeys(intended(c) for c in configs)),
        "facts": {
            "interpreter": here.program,
            "environment": f"{here.kind} {here.name}",
            "python": here.python,
            "torch": str(torch.__version__),
            "cuda_available": torch.cuda.is_available(),
            **{name: value for name, value in found.items() if name != "schema_version"},
            **code,
            "run_profiles": sorted({c.repro.profile for c in configs}),
            "env_policies": sorted({c.environment.policy for c in configs}),
            "snapshot": str(place.build_dir / FOLDER),
        },
        "conditions": [
            {"name": c.name, "problems": [dataclasses.asdict(p) for p in c.problems]}
            for c in examined
        ],
        "passed": not any(c.problems for c in examined),
    }


def describe_text(told: Mapping[str, Any]) -> str:
    """``describe`` for people: a line for each kind of run, each fact, each condition that holds and
    each problem."""
    lines = [f"RUN     {text}" for text in told["runs"]]
    lines += [f"FACT    {name:18} {_words(value)}" for name, value in told["facts"].items()]
    for condition in told["conditions"]:
        problems = [Problem(**found) for found in condition["problems"]]
        lines += [f"FAIL    {condition['name']:18} {problem}" for problem in problems]
        lines += [] if problems else [f"OK      {condition['name']}"]
    return "\n".join(lines) + "\n"


def check_weights(configs: Sequence[Config], build_dir: Path) -> None:
    """Fetch what ``INIT_FROM`` names where it is missing, and compare it with the models.

    ConfigError with everything that does not fit, PreflightError where the weights cannot be had.
    """
    problems: list[Problem] = []
    for config in {(c.init, c.data, c.model): c for c in configs}.values():
        if config.init.init_from:
            problems += mismatches(fetch(config, build_dir), config.model)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def check_data(configs: Sequence[Config], build_dir: Path) -> None:
    """Prepare the data of ``configs`` where it is missing, and verify every byte of it.

    Each distinct data set once. PreflightError with all problems at once.
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
    """The model of the first visible GPU. PreflightError when there is none."""
    import torch

    if not torch.cuda.is_available():
        raise PreflightError("there is no GPU")
    return torch.cuda.get_device_name(0)


def _device_problems(configs: Sequence[Config]) -> list[Problem]:
    """What the device cannot do, and GPUs that a run would leave unused."""
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
    """Take the snapshot of the environment and of the hardware; why that cannot be done."""
    import torch

    from lib.environment.hardware import probe_hardware

    folder = place.build_dir / FOLDER
    asked = [c for c in configs if c.environment.snapshot]
    problems: list[Problem] = []
    for wanted in {c.environment: None for c in asked}:
        problems += _problems(refresh_snapshot, folder, wanted, running())
    if asked:
        on_gpu = torch.cuda.is_available() and any(c.machine.device == "cuda" for c in asked)
        problems += _problems(probe_hardware, folder, torch.device("cuda" if on_gpu else "cpu"))
    return problems


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, dict):
        return " ".join(map(_words, value.values()))
    return {None: "none", True: "yes", False: "no"}.get(value, str(value))


def _problems(check: Callable[..., object], *arguments: object) -> list[Problem]:
    """The problems of the error that ``check`` raises."""
    try:
        check(*arguments)
    except KablateError as error:
        return list(error.problems)
    return []


def _slots(configs: Sequence[Config]) -> list[dict[str, str]]:
    """One for each group of ``GPUS`` GPUs, or as many as cores hold runs of ``CPU_THREADS`` each
    process."""
    if all(config.machine.device == "cpu" for config in configs):
        threads = max(config.machine.cpu_threads * config.train.gpus for config in configs)
        return [{}] * max(1, usable_cores() // threads)
    import torch

    size = max(config.train.gpus for config in configs)
    return gpu_groups(torch.cuda.device_count(), size, rocm=torch.version.hip is not None)
