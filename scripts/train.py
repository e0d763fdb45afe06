#!/usr/bin/env python3
"""Train one run in this process: errors keep their traceback, and a debugger can be attached.

    train.py                    the configured training
    train.py --steps 7          one step of a study
    python -m pdb scripts/train.py --steps 7

Ctrl-C saves a checkpoint and stops; the same command resumes the run.
"""

import _start

from gpt2.planning.arguments import add_allow_dirty, add_selection, asked_plan, new_parser
from gpt2.running import launch
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_allow_dirty(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    return launch.train_here(plan, dirty=args.allow_dirty)


if __name__ == "__main__":
    console.run_main(main)
