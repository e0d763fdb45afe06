"""Command-line options shared by the scripts.

The default of each option is an environment variable that make exports, so that
``make STEPS=0-3`` and ``--steps 0-3`` are equivalent. A variable of make's command line that a script
does not read is an error.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.config import StudyConfig
from gpt2.quantized.options import reject_training
from gpt2.study.looks import AUTO_SEEDS
from gpt2.study.plan import Plan, Sweep, config_layers, make_plan, table_plan
from lib import make_variables
from lib.config.field import WHOLE_NUMBER
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.console import CommandLine
from lib.errors import ConfigError, Problem
from lib.runner.hooks import command_words
from lib.runner.runner import RunnerOptions
from lib.runs.run_dir import State


class CommandParser(CommandLine):
    """Parser that refuses variables of make's command line without an option of the same name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._reads: set[str] = set()
        self._commands: dict[str, CommandParser] = {}
        super().__init__(*arguments, **named)

    # The signature of argparse.
    def add_argument(self, *arguments: Any, **named: Any) -> argparse.Action:
        """Add an argument, and record the name of its variable."""
        action = super().add_argument(*arguments, **named)
        self._reads.add(action.dest.upper())
        return action

    def add_commands(self, descriptions: dict[str, str]) -> "dict[str, CommandParser]":
        """Add optional subcommands; return their parsers by name."""
        self.set_defaults(command="")
        subparsers = self.add_subparsers(dest="command", metavar="COMMAND")
        for name, text in descriptions.items():
            self._commands[name] = subparsers.add_parser(name, help=text, description=text)
        return self._commands

    def parse(self) -> argparse.Namespace:
        """Return the options of the command line and of make's variables.

        The option ``command_line`` is the command that resumes an interrupted make. Logs the variables
        that come from the environment. Raises ConfigError if a variable was given to make that the
        script does not read.
        """
        arguments = self.parse_args()
        parser = self._commands.get(vars(arguments).get("command", ""), self)
        arguments.command_line = make_variables.resume_command()
        make_variables.require_read(parser._reads)
        return arguments

    def words(self, arguments: argparse.Namespace, without: Sequence[str]) -> list[str]:
        """Return the words of a command line with the options ``arguments``, but those ``without``."""
        words = []
        for name, value in vars(arguments).items():
            if value and name not in without and name.upper() in self._reads:
                option = f"--{name.replace('_', '-')}"
                words.append(option if value is True else f"{option}={value}")
        return words


def new_parser(description: str | None) -> CommandParser:
    """Return a parser with ``-O`` whose help text is the script's docstring."""
    parser = CommandParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-O", "--build-dir", type=Path, default=Path(), help="folder of .config, data and results"
    )
    return parser


def add_subcommands(
    parser: CommandParser, descriptions: dict[str, str]
) -> dict[str, CommandParser]:
    """Add optional subcommands, stored as ``command`` ("" if none); return their parsers."""
    commands = parser.add_commands(descriptions)
    for command in commands.values():
        # The default of the main parser applies to both positions of -O.
        command.add_argument("-O", "--build-dir", type=Path, default=argparse.SUPPRESS)
    return commands


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the runs to plan.

    The options are ``--set``, ``--gpus``, ``--steps``, ``--seeds``, ``--seed``, ``--sweep``,
    ``--samples`` and ``--yes``.
    """
    add_settings(parser)
    add_variable(parser, "steps", 'steps of a study, such as "0-3,ra,16"')
    add_variable(parser, "seeds", 'seeds, such as "1-3"; auto: until every comparison has a word')
    # As in generate and randconfig.
    add_variable(parser, "seed", "one seed; like --seeds")
    add_variable(parser, "sweep", 'axes, such as "LEARNING_RATE=1e-4,3e-4", or a file with axes')
    add_variable(parser, "samples", "number of random combinations of the sweep")
    # Only evaluate quantizes.
    add_variable(parser, "quant", argparse.SUPPRESS)
    add_yes(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--set`` and ``--gpus``: settings on top of ``.config``, for this command only."""
    add_variable(parser, "set", 'settings on top of .config, such as "N_LAYER=4 DROPOUT=0.1"')
    add_variable(parser, "gpus", "GPUs of each run; like --set GPUS=n")


def settings_layers(arguments: argparse.Namespace) -> list[ConfigLayer]:
    """Return the layer of the options of ``add_settings``; none without a setting."""
    gpus = [shlex.quote(f"GPUS={arguments.gpus}")] if arguments.gpus else []
    text = " ".join([*filter(None, [arguments.set]), *gpus])
    if not text:
        return []
    layer = parse_command_line_settings(text)
    if gpus and layer.assignments:
        *others, last = layer.assignments
        layer = replace(layer, assignments=(*others, replace(last, where="GPUS")))
    return [layer]


@dataclass(frozen=True)
class RunLookup:
    """Options that determine the plan in which the name of a run is looked up."""

    steps: str = ""
    seeds: str = ""
    settings: Sequence[ConfigLayer] = ()

    def plan(self, build_dir: Path) -> Plan:
        """Return the plan of ``.config`` with these options."""
        layers = [*config_layers(build_dir), *self.settings]
        return make_plan(layers, build_dir, steps=self.steps, seeds=self.seeds)


def add_lookup(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``RunLookup``."""
    add_settings(parser)
    add_variable(parser, "steps", "steps of the study among which a run is looked up")
    add_variable(parser, "seeds", "seeds among which a run is looked up")
    add_variable(parser, "seed", "one seed; like --seeds")


def asked_lookup(arguments: argparse.Namespace) -> RunLookup:
    """Return the lookup for the options of ``add_lookup``."""
    return RunLookup(arguments.steps, _asked_seeds(arguments), settings_layers(arguments))


def _asked_seeds(arguments: argparse.Namespace) -> str:
    """Return the seeds of SEEDS= or the one of SEED=. Raises ConfigError if SEED is not one seed."""
    if not arguments.seed:
        return str(arguments.seeds)
    if arguments.seeds:
        what = f"conflicts with SEEDS={arguments.seeds} (expected SEED= or SEEDS=)"
        advice = "type: make SEED= SEEDS=..."
        raise ConfigError(Problem(what, "SEED", advice, code="usage.conflict"))
    if not WHOLE_NUMBER.fullmatch(arguments.seed):
        what = f"invalid seed {arguments.seed!r} (expected one non-negative integer)"
        advice = "several seeds: make SEEDS=1-3"
        raise ConfigError(Problem(what, "SEED", advice, code="usage.invalid-seed"))
    return str(arguments.seed)


def asked_plan(arguments: argparse.Namespace) -> tuple[list[ConfigLayer], Plan]:
    """Return the layers of ``.config`` and the plan for the options of ``add_selection``.

    Raises ConfigError with all problems of the configuration and of the options.
    """
    reject_training(arguments.quant)
    layers = [*config_layers(arguments.build_dir), *settings_layers(arguments)]
    sweep = None
    samples = whole_number(arguments.samples, "SAMPLES", 1) if arguments.samples else 0
    if arguments.sweep:
        sweep = Sweep(arguments.sweep, samples)
    elif samples:
        advice = 'type: make SWEEP="A=1,2 B=3,4" SAMPLES=2'
        problem = Problem("requires SWEEP=", "SAMPLES", advice, code="usage.missing-argument")
        raise ConfigError(problem)
    plan = make_plan(
        layers,
        arguments.build_dir,
        steps=arguments.steps,
        seeds=_asked_seeds(arguments),
        sweep=sweep,
        yes=arguments.yes,
    )
    return layers, plan


def asked_tables(arguments: argparse.Namespace) -> tuple[Plan, Plan, bool]:
    """Return the plan for the options, that of all runs of its study, and whether the first selects.

    Files are written from all runs: a selection changes only what is printed.
    """
    layers, plan = asked_plan(arguments)
    whole = table_plan(plan, layers)
    selected = selects_runs(arguments) and whole.runs != plan.runs
    return plan, whole, selected and {r.path for r in plan.runs} != {r.path for r in whole.runs}


def selects_runs(arguments: argparse.Namespace) -> bool:
    """Return whether the options of ``add_selection`` select a part of the study's runs."""
    return bool(arguments.steps) or _asked_seeds(arguments) not in ("", AUTO_SEEDS)


def add_running(parser: argparse.ArgumentParser) -> None:
    """Add the runner options: ``--jobs``, ``--on-stale``, ``--keep-going``, ``--allow-dirty``."""
    parser.set_defaults(command_line="make")
    add_variable(parser, "jobs", "concurrent runs; 0 for as many as fit")
    add_variable(parser, "on-stale", "how to treat runs made by other code: stop, rerun or keep")
    add_variable(parser, "keep-going", "y, or n to start no more runs after a failure")
    add_allow_dirty(parser)


def add_allow_dirty(parser: argparse.ArgumentParser) -> None:
    """Add ``--allow-dirty``: allow training with uncommitted code."""
    _add_flag(parser, "allow-dirty", "train uncommitted code, and save the diff (ALLOW_DIRTY=y)")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add ``--dry-run``: check the runs, and train none."""
    _add_flag(parser, "dry-run", "check without training (DRY_RUN=1)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: print one JSON document on stdout."""
    _add_flag(parser, "json", "one JSON document on stdout")


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add ``--strict``: exit code 5 if a comparison is INCONCLUSIVE."""
    _add_flag(parser, "strict", "exit code 5 if a comparison is INCONCLUSIVE (STRICT=1)")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes``: skip confirmation prompts."""
    _add_flag(parser, "yes", "answer yes to questions")


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add ``--axis`` and ``--label-by``: the settings in which compared runs may differ."""
    add_variable(parser, "axis", "comma-separated symbols under comparison")
    add_variable(parser, "label-by", "symbols or fields that may differ too, shown as labels")


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add ``--force``: reproduce a run that is not comparable."""
    _add_flag(parser, "force", "train even if not comparable (FORCE=1)")


def add_twice(parser: argparse.ArgumentParser) -> None:
    """Add ``--twice``: train a configuration twice instead of a finished run again."""
    _add_flag(parser, "twice", "train one configuration twice, and compare (TWICE=1)")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Add the text generation options: run, prompt and sampling parameters."""
    add_variable(parser, "run", "directory of a finished run, or a pattern that matches one run")
    add_variable(parser, "seeds", "seeds of .config's runs that the pattern is matched against")
    add_variable(parser, "prompt", "text to continue; default: start a new document")
    add_variable(parser, "tokens", "maximum number of new tokens", "100")
    add_variable(parser, "temperature", "divides the logits; 0 is greedy decoding", "1")
    add_variable(parser, "top-k", "sample from the k most likely tokens; 0 for all", "0")
    add_variable(parser, "top-p", "sample from the smallest set with probability p", "1")
    add_variable(parser, "seed", "random seed for sampling", "1")
    add_variable(parser, "samples", "number of texts", "1")


def run_options(arguments: argparse.Namespace, study: StudyConfig) -> RunnerOptions:
    """Return the runner options for the options of ``add_running``, with the defaults of ``study``.

    Raises ConfigError if a value is invalid.
    """
    jobs = whole_number(arguments.jobs or str(study.jobs), "JOBS")
    keep_going = make_variables.is_yes(arguments.keep_going or "y", "KEEP_GOING")
    return RunnerOptions(
        jobs,
        arguments.on_stale or study.on_stale,
        keep_going,
        arguments.allow_dirty,
        commands={
            State.SUCCESS: command_words(study.on_done_command, "ON_DONE_CMD"),
            State.FAILED: command_words(study.on_fail_command, "ON_FAIL_CMD"),
        },
        study_command=command_words(study.on_study_done_command, "ON_STUDY_DONE_CMD"),
        command_line=arguments.command_line,
    )


def whole_number(text: str, name: str, least: int = 0) -> int:
    """Parse an integer of at least ``least``. Raises ConfigError located at the variable ``name``."""
    is_integer = WHOLE_NUMBER.fullmatch(text) is not None
    if not is_integer or int(text) < least:
        what = f"invalid value (expected an integer of at least {least}, got {text!r})"
        code = "usage.out-of-range" if is_integer else "usage.invalid-number"
        raise ConfigError(Problem(what, name, "type: make help", code=code))
    return int(text)


def require_count(count: int, example: str) -> None:
    """Raise ConfigError with the command ``example`` unless COUNT= is at least 1."""
    if count < 1:
        what = f"invalid value (expected at least 1, got {count})"
        raise ConfigError(Problem(what, "COUNT", f"type: {example}", code="usage.invalid-value"))


def number(given: argparse.Namespace, name: str, kind: type[int] | type[float]) -> int | float:
    """Parse the option ``name`` as a number. Raises ConfigError located at make's variable."""
    text = vars(given)[name]
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        what = f"invalid value (expected {expected}, got {text!r})"
        problem = Problem(
            what, name.upper().replace("-", "_"), "type: make help", code="usage.invalid-number"
        )
        raise ConfigError(problem) from None


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add ``--probe``: time steps on this machine."""
    _add_flag(parser, "probe", "time steps of each model on this machine (PROBE=1)")


def add_submit(parser: argparse.ArgumentParser) -> None:
    """Add ``--submit``: submit the script to SLURM."""
    _add_flag(parser, "submit", "submit the script (SUBMIT=y)")


def _add_flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add the option ``--name``, set by default if the environment variable is."""
    default = make_variables.is_set(name.upper().replace("-", "_"))
    parser.add_argument(f"--{name}", action="store_true", default=default, help=text)


def add_variable(parser: argparse.ArgumentParser, name: str, text: str, default: str = "") -> None:
    """Add the option ``--name``, whose default is the environment variable that make exports."""
    variable = name.upper().replace("-", "_")
    # An empty variable counts as unset.
    default = os.environ.get(variable) or default
    parser.add_argument(f"--{name}", default=default, help=f"{text} ({variable}=)")


def add_positional(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add a positional argument; without it, the value is make's variable of the same name."""
    variable = name.upper()
    parser.add_argument(
        name, nargs="?", metavar=variable, default=os.environ.get(variable, ""), help=text
    )


def add_fast(parser: argparse.ArgumentParser) -> None:
    """Add ``--fast``: skip the slow checks."""
    _add_flag(parser, "fast", "skip the slow checks")


def add_full(parser: argparse.ArgumentParser) -> None:
    """Add ``--full``: test the full context length."""
    _add_flag(parser, "full", "test the full context length")
