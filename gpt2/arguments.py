"""The options that run commands share.

Each has the environment variable through which make hands down what a user typed, so that
``make STEPS=0-3`` and ``--steps 0-3`` are the same.
"""

import argparse
import os
from pathlib import Path

from lib.errors import ConfigError, Problem
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
    """``--steps`` and ``--seeds``: which runs are planned."""
    _add(parser, "steps", 'steps of a study, such as "0-3,ra,16"')
    _add(parser, "seeds", 'seeds, such as "1,2,3" or "1-3"')


def add_running(parser: argparse.ArgumentParser) -> None:
    """``--jobs``, ``--stale`` and ``--keep-going``: how runs are run."""
    _add(parser, "jobs", "runs at a time; 0 takes as many as fit")
    _add(parser, "stale", "what to do about runs of other code: rerun or keep")
    _add(parser, "keep-going", "y, or n to start nothing after a failed run")


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


def run_options(arguments: argparse.Namespace, default_jobs: int) -> Options:
    """What ``add_running`` was given. ConfigError on a value that means nothing."""
    jobs, keep_going = arguments.jobs or str(default_jobs), arguments.keep_going or "y"
    if not jobs.isdecimal():
        raise ConfigError(Problem(f"{jobs!r} is not a whole number", "JOBS"))
    if keep_going not in ("y", "n"):
        raise ConfigError(Problem(f"{keep_going!r} is neither y nor n", "KEEP_GOING"))
    return Options(int(jobs), arguments.stale, keep_going == "y")


def _add(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    variable = name.upper().replace("-", "_")
    default = os.environ.get(variable, "")
    parser.add_argument(f"--{name}", default=default, help=f"{text} ({variable}=)")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0", "n")
