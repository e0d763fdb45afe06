"""A finished run, opened to be used: its configuration, its model, its tokenizer."""

from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from gpt2.config import Config
from gpt2.data import source, tokenizer
from gpt2.data.tokenizer import Tokenizer
from gpt2.model import GPT
from gpt2.planning import config_layers, make_plan
from gpt2.runs import read_resolved_config
from lib.console import say
from lib.errors import ConfigError, DataError, Problem
from lib.machine.options import MachineConfig
from lib.rundir import RunDir
from lib.status import State, read_status


@dataclass(frozen=True)
class Trained:
    """What a finished run left; the model is on the device of ``machine``, set to evaluate."""

    run: RunDir
    config: Config
    machine: MachineConfig
    model: GPT
    tokenizer: Tokenizer


def find_run(name: str, build_dir: Path, seeds: str = "") -> RunDir:
    """The finished run that ``name`` means: its directory, or a pattern over .config's runs.

    ConfigError when there is none, when there are several, and when it is not finished.
    """
    if not name:
        raise ConfigError(Problem("names no run", "RUN", "type: make plan, which lists them"))
    run = RunDir(Path(name) if Path(name).is_dir() else _planned(name, build_dir, seeds))
    status = read_status(run)
    if status is None:
        raise ConfigError(Problem("has not been trained", str(run.path), "type: make"))
    if status.state is not State.SUCCESS:
        what = f"is not finished: {status.state} at iteration {status.iteration:,}"
        raise ConfigError(Problem(what, str(run.path), "type: make, which goes on with it"))
    return run


def open_trained(run: RunDir, build_dir: Path) -> Trained:
    """Load a finished run; its tokenizer's files lie below ``build_dir``, as DATA_DIR says.

    ConfigError where the run was made by other code, DataError where a file is missing or damaged.
    """
    config = read_resolved_config(run)
    words = tokenizer.load(config.data.tokenizer, source.downloads_folder(config.data, build_dir))
    machine = _machine(config.machine)
    torch.set_num_threads(machine.cpu_threads)
    model = GPT(config.model)
    try:
        model.load_state_dict(safetensors.torch.load_file(run.weights))
    except (OSError, SafetensorError) as error:
        remedy = f"type: make rerun RUNS={run.path.name}"
        raise DataError(Problem(f"cannot be read: {error}", str(run.weights), remedy)) from None
    return Trained(run, config, machine, model.to(machine.device).eval(), words)


def _planned(pattern: str, build_dir: Path, seeds: str) -> Path:
    plan = make_plan(config_layers(build_dir), build_dir, seeds=seeds)
    found = [run for run in plan.runs if run.matches(pattern)]
    if not found:
        what = f"{pattern!r} is neither a folder nor a run of {plan.study}"
        raise ConfigError(Problem(what, "RUN", "type: make plan, which lists them"))
    if len(found) > 1:
        named = ", ".join(run.path.name for run in found[:3])
        what = f"{pattern!r} names {len(found)} runs: {named}" + (", …" if found[3:] else "")
        raise ConfigError(Problem(what, "RUN", "name one of them"))
    return found[0].path


def _machine(machine: MachineConfig) -> MachineConfig:
    """The run's own, or the CPU where its device is not here: said, for the bits are others."""
    if machine.device == "cpu" or torch.cuda.is_available():
        return machine
    say("WARN", "trained on a GPU, and here is none: written on the CPU in fp32")
    return replace(machine, device="cpu", precision="fp32")
