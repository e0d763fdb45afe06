"""Checks of machine, GPU, Python environment and disk, which return their problems; torch only for devices."""

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lib.env.options import EnvironmentConfig, MachineConfig
from lib.env.packages import (
    Interpreter,
    install_command,
    installed_packages,
    lock_differences,
    missing_packages,
)
from lib.errors import ConfigError, KablateError, PreflightError, Problem
from lib.project import ROOT
from lib.units import GIB, format_size

# Files of other package managers, refused by ENV_FORBID_FOREIGN.
FOREIGN_FILES = (".venv", "uv.lock", "poetry.lock", "Pipfile")


def environment_problems(
    config: EnvironmentConfig,
    here: Interpreter,
    results: Path,
    root: Path = ROOT,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, list[Problem]]:
    """Return condition → its problems: the settings of ``config``, and the required packages."""
    python, advice = [], "see docs/environment.md"
    if config.python and not f"{here.python}.".startswith(f"{config.python}."):
        what = f"ENV_PYTHON={config.python}: {here.program} is Python {here.python}"
        python.append(Problem(what, next=advice, code="env.wrong-python"))
    packages = []
    if missing := missing_packages():
        what = f"packages missing in {sys.executable}: {', '.join(missing)}"
        advice = shlex.join(install_command(sys.executable))
        packages.append(Problem(what, next=advice, code="env.missing-package"))
    foreign = [
        Problem(
            f"ENV_FORBID_FOREIGN=y: found {n}", str(root / n), "remove it", code="env.foreign-file"
        )
        for n in FOREIGN_FILES
        if config.forbid_foreign and os.path.lexists(root / n)
    ]
    least = f"MIN_DISK_GIB={config.min_disk_gib}: "
    return {
        "environment": _policy_problems(config, here, variables),
        "python": python,
        "packages": packages,
        "foreign tools": foreign,
        "lock file": _lock_problems(config, root),
        "disk": _space_problems(_existing(results), config.min_disk_gib * GIB, least),
    }


def _policy_problems(
    config: EnvironmentConfig, here: Interpreter, variables: Mapping[str, str]
) -> list[Problem]:
    """Check the kind, name and activation of the environment against ``ENV_POLICY``."""
    advice, problems = "see docs/environment.md", []
    if config.policy == "any":
        return []
    if here.kind != config.policy:
        named = "no" if here.kind == "system" else f"a {here.kind}"
        owner = f"{here.program} belongs to {named} environment ({here.prefix})"
        what = f"ENV_POLICY={config.policy}: {owner}"
        return [Problem(what, next=advice, code="env.wrong-kind")]
    if config.name and here.name != config.name:
        what = f"ENV_NAME={config.name}: environment is {here.name} ({here.prefix})"
        problems.append(Problem(what, next=advice, code="env.wrong-name"))
    # Activation sets variables that libraries outside Python read.
    active = variables.get("CONDA_PREFIX", "")
    if config.policy == "conda" and Path(active or "/").resolve() != here.prefix.resolve():
        values = f"expected CONDA_PREFIX={here.prefix}, got {active!r}"
        what, advice = f"environment not activated ({values})", f"type: conda activate {here.name}"
        problems.append(Problem(what, next=advice, code="env.not-activated"))
    return problems


def _lock_problems(config: EnvironmentConfig, root: Path) -> list[Problem]:
    if not config.lock_file:
        return []
    path = root / config.lock_file
    try:
        differences = lock_differences(path, installed_packages())
    except FileNotFoundError:
        what = "ENV_LOCK_FILE: file not found"
        return [Problem(what, str(path), "type: uv lock", code="lock-file.missing")]
    except ConfigError as error:
        return list(error.problems)
    if not differences or not config.lock_enforce:
        return []
    shown = ", ".join(differences[:5]) + (" …" if len(differences) > 5 else "")
    what = f"ENV_LOCK_ENFORCE=y: {len(differences)} packages differ: {shown}"
    advice = "type: uv sync, or uv pip sync with the lock file"
    return [Problem(what, str(path), advice, code="lock-file.mismatch")]


def output_problems(folder: Path, bytes_needed: int) -> list[Problem]:
    """Return the reasons why ``bytes_needed`` bytes of results cannot be written to ``folder``."""
    existing = _existing(folder)
    if not existing.is_dir():
        advice = "type: SET='OUTPUT_DIR=\"…\"'"
        return [Problem("not a folder", str(existing), advice, code="output.not-a-folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "make it writable, or set OUTPUT_DIR to another folder"
        return [Problem("not writable", str(existing), advice, code="output.not-writable")]
    return _space_problems(existing, bytes_needed)


def _space_problems(folder: Path, bytes_needed: int, name: str = "") -> list[Problem]:
    free = shutil.disk_usage(folder).free
    if free >= bytes_needed:
        return []
    sizes = f"{format_size(bytes_needed)} needed, {format_size(free)} free"
    what, advice = f"{name}not enough disk space ({sizes})", "free some space, or set OUTPUT_DIR"
    return [Problem(what, str(folder), advice, code="disk.no-space")]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest of its parents that exists."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def problems_of(check: Callable[..., object], *arguments: object) -> list[Problem]:
    try:
        check(*arguments)
    except KablateError as error:
        return list(error.problems)
    return []


def require_machine(machine: MachineConfig, processes: int = 1) -> None:
    """Raise PreflightError with all problems unless this machine supports the settings."""
    if problems := machine_problems(machine, processes):
        raise PreflightError(*problems)


def machine_problems(machine: MachineConfig, processes: int = 1) -> list[Problem]:
    """Check that this machine supports the settings; writes and starts nothing."""
    problems = compiler_problems(machine.device) if machine.compile else []
    if machine.device == "cpu":
        return problems
    import torch

    if not torch.cuda.is_available():
        reason = "no GPU reported by the driver"
        if not (torch.version.cuda or torch.version.hip):
            reason = f"torch {torch.__version__} is built for the CPU"
        what = f"DEVICE=cuda: no GPU available ({reason})"
        advice = "type: make defconfig-NAME+cpu   (or add SET=DEVICE_CPU=y)"
        return [Problem(what, next=advice, code="gpu.missing"), *problems]
    if (count := torch.cuda.device_count()) < processes:
        what = f"GPUS={processes}: not enough GPUs ({count} visible)"
        problems.append(Problem(what, code="gpu.too-few"))
    if machine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        what = f"PRECISION=bf16: {torch.cuda.get_device_name(0)} does not support bf16"
        problems.append(Problem(what, next="type: SET=PRECISION_FP16=y", code="gpu.unsupported"))
    return problems


def pinned_gpu_problems(pinned: bool, processes: int) -> list[Problem]:
    """Return a problem if ``pinned`` and more GPUs are visible than ``processes``."""
    import torch

    visible = torch.cuda.device_count()
    if not pinned or visible <= processes:
        return []
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    names = ",".join(map(str, range(processes)))
    what = f"GPU_PINNED: too many visible GPUs (expected GPUS={processes}, got {visible})"
    return [Problem(what, next=f"type: {variable}={names} make", code="gpu.not-pinned")]


def require_usable_gpus() -> None:
    """Use every visible GPU once. Raises PreflightError with what the driver reports of a lost one."""
    import torch

    try:
        for index in range(torch.cuda.device_count()):
            use_gpu(index)
    except RuntimeError as error:
        raise PreflightError(Problem(str(error).splitlines()[0], code="gpu.lost")) from None


def use_gpu(index: int) -> None:
    import torch

    torch.ones(1, device=torch.device("cuda", index)).add_(1).item()


def compiler_problems(device: str) -> list[Problem]:
    """Return missing compilers: torch.compile requires C++ on a CPU and Triton on a GPU."""
    if device == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        what = "COMPILE=y: no C++ compiler found"
        return [Problem(what, next="type: apt-get install g++", code="env.missing-compiler")]
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        what = "COMPILE=y: package triton is missing"
        return [Problem(what, next="type: SET=COMPILE=n", code="env.missing-package")]
    return []
