#!/usr/bin/env python3
"""Train a finished run again from its directory, and compare the results byte by byte.

    reproduce.py --run DIR                 with the data in the build folder (prepared if missing)
    reproduce.py --run DIR --data DATA     with another data folder
    reproduce.py --run DIR --force         even if code, torch, device or data differ
    reproduce.py --twice                   train .config twice instead; of a study, the first run
    reproduce.py --twice --steps ra        this step of the study
    reproduce.py --twice --defconfig NAME  this configuration instead of .config (or --run DIR)

Does not require or modify .config. New runs are created in the folder "reproduced" (with --twice
"determinism") of the build folder. Prints BITWISE, DIVERGED with the first differing field, or NOT
COMPARABLE with every reason: different torch, device, data set or code. A run made with uncommitted
edits is trained in a checkout of its commit with the recorded edits, after a question (--yes answers
it), because these edits are code from the run directory. Exit codes: 0 the same bytes, 1
diverged or failed, 2 configuration or no such run, 3 machine or data, 4 not comparable.
"""

import sys

import _start

from gpt2.planning.arguments import (
    add_force,
    add_json,
    add_twice,
    add_variable,
    add_yes,
    new_parser,
)
from gpt2.running.reproduce import Request, reproduce, train_twice
from lib import console
from lib.errors import ConfigError, Problem
from lib.report.compare import CONTINUATION


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "run", "directory of a finished run, or a run name that make plan lists")
    add_variable(parser, "data", "a data folder, as in DATA_DIR")
    add_force(parser)
    add_yes(parser)
    add_twice(parser)
    add_variable(parser, "defconfig", "with --twice: this configuration (NAME[+FRAGMENT])")
    add_variable(parser, "steps", "with --twice: step of a study")
    add_json(parser)
    args = parser.parse()
    if args.twice:
        code, text = train_twice(
            args.build_dir, args.run, args.defconfig, args.steps, json=args.json
        )
    elif args.defconfig or args.steps:
        raise ConfigError(
            Problem("requires TWICE=1", "DEFCONFIG, STEPS", code="usage.missing-argument")
        )
    else:
        code, text = reproduce(
            Request(
                args.run,
                args.build_dir,
                args.data,
                force=args.force,
                yes=args.yes,
                json=args.json,
            )
        )
    columns = None if args.json else console.terminal_columns(sys.stdout)
    console.show(console.folded(text, columns, CONTINUATION))
    return code


if __name__ == "__main__":
    console.run_main(main)
