#!/usr/bin/env python3
"""Hold the seeds of finalists to what a claim needs, and test them.

    finalists.py "results/ratio/baseline-s* results/ratio/ra-s*"
    finalists.py baseline,ra --seeds 1-6         as "make plan" names them

Runs that differ in their seed alone are one variant; the first is what the others are tested
against. Prints every value, mean, deviation, the tests and the smallest p that so many seeds can
reach. Refused, with the reason, is a variant with too few seeds, a seed twice, a seed that
diverged, losses that are all the same, or a model that has learnt nothing. Exit codes: 0 all sound,
2 no such run, 4 refused.
"""

import os

import _start

from gpt2.arguments import add_json, add_selection, new_parser
from gpt2.comparison import finalists
from lib import cli
from lib.analysis.finalists_text import finalists_json, finalists_text


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    parser.add_argument("runs", nargs="?", default=os.environ.get("RUNS", ""), metavar="RUNS")
    given = parser.parse_args()
    found = finalists(given.runs, given.build_dir, steps=given.steps, seeds=given.seeds)
    print(finalists_json(found) if given.json else finalists_text(found), end="")
    return found.exit_code


if __name__ == "__main__":
    cli.run(main)
