"""The options that run commands share.

Each has the environment variable through which make hands down what a user typed, so that
``make STEPS=0-3`` and ``--steps 0-3`` are the same.
"""

import argparse
import os
from pathlib import Path

from gpt2.check import randcheck
from gpt2.check.command import Request
from gpt2.combinations import Sweep
from gpt2.planning import Plan, config_layers, make_plan
from gpt2.quantized.options import refuse_training
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer
from lib.runner.runner import Options


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, with ``-O``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-O", "--build-dir", type=Path, default=Path(), help="folder of .config, data and results"
    )
    return parser


def add_selection(parser: argparse.ArgumentParser) -> None:
    """``--steps``, ``--seeds``, ``--sweep``, ``--samples``, ``--yes``: which runs are planned."""
    add_variable(parser, "steps", 'steps of a study, such as "0-3,ra,16"')
    add_variable(parser, "seeds", 'seeds, such as "1,2,3" or "1-3"')
    add_variable(parser, "sweep", 'axes, such as "LEARNING_RATE=1e-4,3e-4", or a file of them')
    add_variable(parser, "samples", "how many combinations of a sweep to draw at random")
    add_yes(parser)


def asked_plan(arguments: argparse.Namespace) -> tuple[list[Layer], Plan]:
    """The layers of ``.config``, and the runs that ``add_selection`` was given.

    ConfigError with all problems of the configuration and of what was asked.
    """
    refuse_training(os.environ.get("QUANT", ""))
    layers = config_layers(arguments.build_dir)
    sweep = None
    samples = whole_number(arguments.samples or "0", "SAMPLES")
    if arguments.sweep:
        sweep = Sweep(arguments.sweep, samples)
    elif samples:
        raise ConfigError(Problem("there is no SWEEP to draw from", "SAMPLES"))
    plan = make_plan(
        layers,
        arguments.build_dir,
        steps=arguments.steps,
        # What generate and randcheck call their one seed, a training has too.
        seeds=arguments.seeds or os.environ.get("SEED", ""),
        sweep=sweep,
        yes=arguments.yes,
    )
    return layers, plan


def add_running(parser: argparse.ArgumentParser) -> None:
    """``--jobs``, ``--stale``, ``--keep-going`` and ``--dirty``: how runs are run."""
    add_variable(parser, "jobs", "runs at a time; 0 takes as many as fit")
    add_variable(parser, "stale", "what to do about runs of other code: rerun or keep")
    add_variable(parser, "keep-going", "y, or n to start nothing after a failed run")
    add_dirty(parser)


def add_dirty(parser: argparse.ArgumentParser) -> None:
    """``--dirty``: train code that is not committed."""
    parser.add_argument(
        "--dirty",
        action="store_true",
        default=_is_set("DIRTY"),
        help="train code that is not committed, and keep the difference (DIRTY=y)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: one JSON document on stdout."""
    parser.add_argument(
        "--json", action="store_true", default=_is_set("JSON"), help="one JSON document on stdout"
    )


def add_yes(parser: argparse.ArgumentParser) -> None:
    """``--yes``: no questions."""
    parser.add_argument(
        "--yes", action="store_true", default=_is_set("YES"), help="answer yes to questions"
    )


def add_labels(parser: argparse.ArgumentParser) -> None:
    """``--axis`` and ``--label-by``: in what runs may differ that are put side by side."""
    add_variable(parser, "axis", "symbols that were to differ, separated by commas")
    add_variable(parser, "label-by", "symbols or fields that differ too, shown as labels")


def add_force(parser: argparse.ArgumentParser) -> None:
    """``--force``: go on in spite of what makes two runs not comparable."""
    parser.add_argument(
        "--force", action="store_true", default=_is_set("FORCE"), help="train all the same"
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Which run writes, after which prompt, and how tokens are drawn."""
    add_variable(parser, "run", "directory of a finished run, or a pattern that names one")
    add_variable(
        parser, "seeds", "seeds of .config's runs, where the pattern is to choose among them"
    )
    add_variable(parser, "prompt", "text to go on from; without one, a new document begins")
    add_variable(parser, "tokens", "the most tokens of a text", "100")
    add_variable(parser, "temperature", "divides the logits; 0 takes the most likely token", "1")
    add_variable(parser, "top-k", "draw among the k most likely tokens; 0 for all", "0")
    add_variable(parser, "top-p", "draw among the most likely tokens that add up to p", "1")
    add_variable(parser, "seed", "decides what is drawn", "1")
    add_variable(parser, "samples", "number of texts", "1")


def add_checking(parser: argparse.ArgumentParser) -> None:
    """What ``make check`` takes."""
    add_variable(parser, "steps", 'steps of a study, such as "0-3,ra,16"')
    add_variable(parser, "checks", 'checks, such as "causal,reload"')
    add_variable(
        parser, "defconfig", "check this configuration (NAME[+FRAGMENT]) instead of .config"
    )
    add_variable(parser, "data", "require: absent data is a failure")
    add_variable(parser, "gpu", 'what the configured size has to fit, such as "a10g"')
    add_variable(parser, "check-gpu-memory-gb", "memory in GiB of a GPU that has no name here")
    _add_fast(parser)


def check_request(arguments: argparse.Namespace) -> Request:
    """What ``add_checking`` was given. ConfigError on a value that means nothing."""
    return Request(
        arguments.build_dir,
        steps=arguments.steps,
        checks=arguments.checks,
        defconfig=arguments.defconfig,
        data=arguments.data,
        gpu=arguments.gpu,
        gpu_memory_gb=arguments.check_gpu_memory_gb,
        fast=arguments.fast,
        json=arguments.json,
    )


def add_random_checking(parser: argparse.ArgumentParser) -> None:
    """What ``make randcheck`` takes."""
    add_variable(parser, "n", "number of configurations", "50")
    add_variable(parser, "seed", "decides which they are", "1")
    add_variable(parser, "checks", 'checks, such as "causal,reload"')
    _add_fast(parser)


def random_request(arguments: argparse.Namespace) -> randcheck.Request:
    """What ``add_random_checking`` was given. ConfigError on a value that means nothing."""
    return randcheck.Request(
        arguments.build_dir,
        whole_number(arguments.n, "N"),
        whole_number(arguments.seed, "SEED"),
        checks=arguments.checks,
        fast=arguments.fast,
        json=arguments.json,
    )


def run_options(arguments: argparse.Namespace, default_jobs: int) -> Options:
    """What ``add_running`` was given. ConfigError on a value that means nothing."""
    jobs = whole_number(arguments.jobs or str(default_jobs), "JOBS")
    keep_going = arguments.keep_going or "y"
    if keep_going not in ("y", "n"):
        raise ConfigError(Problem(f"{keep_going!r} is neither y nor n", "KEEP_GOING"))
    return Options(jobs, arguments.stale, keep_going == "y", arguments.dirty)


def whole_number(text: str, name: str) -> int:
    """The number that ``text`` is. ConfigError naming the variable ``name``."""
    if not text.isdecimal():
        raise ConfigError(Problem(f"{text!r} is not a whole number", name))
    return int(text)


def number(given: argparse.Namespace, name: str, kind: type[int] | type[float]) -> int | float:
    """An option as a number. ConfigError names make's variable."""
    text = vars(given)[name]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(Problem(f"{text!r} is not {what}", name.upper())) from None


def add_variable(parser: argparse.ArgumentParser, name: str, text: str, default: str = "") -> None:
    """``--name``, whose default is the variable that make hands down."""
    variable = name.upper().replace("-", "_")
    # A variable that is set to nothing is as good as not set.
    default = os.environ.get(variable) or default
    parser.add_argument(f"--{name}", default=default, help=f"{text} ({variable}=)")


def _add_fast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fast", action="store_true", default=_is_set("FAST"), help="leave the slow checks out"
    )


def add_full(parser: argparse.ArgumentParser) -> None:
    """``--full``: at full length."""
    parser.add_argument(
        "--full", action="store_true", default=_is_set("FULL"), help="the long context in full"
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0", "n")
