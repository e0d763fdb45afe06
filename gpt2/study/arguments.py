"""Plans and settings of the runner for the options of a command line.

The options are those that lib/commands.py lists for a command; their values are those of make's
variables of the same names.
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.config import StudyConfig
from gpt2.study.plan import AUTO_SEEDS, Plan, config_layers, make_plan, table_plan
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.errors import ConfigError, Problem
from lib.runner.hooks import command_words
from lib.runner.runner import RunnerOptions
from lib.runs.run_dir import State


def settings_layers(options: Namespace) -> list[ConfigLayer]:
    """Return the layer of SET= and GPUS=; none without a setting."""
    gpus = [shlex.quote(f"GPUS={options.gpus}")] if options.gpus else []
    text = " ".join([*filter(None, [options.set]), *gpus])
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


def asked_lookup(options: Namespace) -> RunLookup:
    """Return the lookup for SET=, GPUS=, STEPS=, SEEDS= and SEED=."""
    return RunLookup(options.steps, _asked_seeds(options), settings_layers(options))


def _asked_seeds(options: Namespace) -> str:
    """Return the seeds of SEEDS= or the one of SEED=. Raises ConfigError if both are given."""
    if options.seed is None:
        return str(options.seeds)
    if options.seeds:
        what = f"conflicts with SEEDS={options.seeds} (expected SEED= or SEEDS=)"
        advice = "type: make SEED= SEEDS=..."
        raise ConfigError(Problem(what, "SEED", advice, code="usage.conflict"))
    return str(options.seed)


def asked_layers(options: Namespace) -> list[ConfigLayer]:
    """Return the layers of ``.config`` and of the options that set symbols."""
    return [*config_layers(options.build_dir), *settings_layers(options)]


def asked_plan(options: Namespace) -> Plan:
    """Return the plan for the options that select runs.

    Raises ConfigError with all problems of the configuration and of the options.
    """
    return make_plan(
        asked_layers(options),
        options.build_dir,
        steps=options.steps,
        seeds=_asked_seeds(options),
        sweep=options.sweep,
        yes=options.yes,
    )


def asked_tables(options: Namespace) -> tuple[Plan, Plan, bool]:
    """Return the plan for the options, that of all runs of its study, and whether the first selects.

    Files are written from all runs: a selection changes only what is printed.
    """
    plan = asked_plan(options)
    whole = table_plan(plan)
    differ = {run.path for run in plan.runs} != {run.path for run in whole.runs}
    return plan, whole, differ and selects_runs(options)


def selects_runs(options: Namespace) -> bool:
    """Return whether the options select a part of the study's runs."""
    return bool(options.steps) or _asked_seeds(options) not in ("", AUTO_SEEDS)


def run_options(options: Namespace, study: StudyConfig) -> RunnerOptions:
    """Return the settings of the runner for the options, with the defaults of ``study``.

    Raises ConfigError if a command of the study is invalid.
    """
    return RunnerOptions(
        study.jobs if options.jobs is None else options.jobs,
        options.on_stale or study.on_stale,
        options.keep_going,
        options.allow_dirty,
        commands={
            State.SUCCESS: command_words(study.on_done_command, "ON_DONE_CMD"),
            State.FAILED: command_words(study.on_fail_command, "ON_FAIL_CMD"),
        },
        study_command=command_words(study.on_study_done_command, "ON_STUDY_DONE_CMD"),
        command_line=options.command_line,
    )
