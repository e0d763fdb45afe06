"""Whether this machine can train a plan's runs, and whether their data is as it was made."""

from collections.abc import Sequence
from pathlib import Path

from gpt2.config import Config
from gpt2.data.prepare import prepare
from gpt2.data.store import open_dataset
from gpt2.weights.source import fetch, mismatches
from lib.errors import ConfigError, KablateError, PreflightError, Problem
from lib.machine.devices import gpu_groups, usable_cores
from lib.machine.setup import preflight


def check_machine(configs: Sequence[Config]) -> list[dict[str, str]]:
    """Check the machine of ``configs``; called in a worker, because it imports torch.

    One set of environment variables for each run that may train at a time. PreflightError with all
    problems at once.
    """
    from gpt2.attention.preflight import check_attention

    problems: list[Problem] = []
    for machine, gpus in {(c.machine, c.train.gpus): None for c in configs}:
        try:
            preflight(machine, gpus)
        except KablateError as error:
            problems.extend(error.problems)
    problems += [p for config in configs for p in config.tracking.missing_packages()]
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    for model, machine in {(c.model, c.machine): None for c in configs}:
        try:
            check_attention(model, machine)
        except KablateError as error:
            problems.extend(error.problems)
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    return _slots(configs)


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


def _slots(configs: Sequence[Config]) -> list[dict[str, str]]:
    """One for each group of ``GPUS`` GPUs, or as many as cores hold runs of ``CPU_THREADS`` each
    process."""
    if all(config.machine.device == "cpu" for config in configs):
        threads = max(config.machine.cpu_threads * config.train.gpus for config in configs)
        return [{}] * max(1, usable_cores() // threads)
    import torch

    size = max(config.train.gpus for config in configs)
    return gpu_groups(torch.cuda.device_count(), size, rocm=torch.version.hip is not None)
