#!/usr/bin/env python3
"""Test the final candidates of a study for significance over several seeds.

    significance.py "results/ratio/baseline-s* results/ratio/ra-s*"
    significance.py baseline,ra --seeds 1-6         run names as listed by "make plan"

Runs that differ only in their seed are one variant; the first variant is the reference. Prints every
value, mean, standard deviation, the tests, and the smallest p-value that the number of seeds allows.
A variant is rejected, with the reason, if it has too few seeds, a duplicate or diverged seed,
identical losses, or a model that has not learned. Exit codes: 0 all accepted, 2 no such run, 4
rejected.
"""

import os

import _start

from gpt2.planning.arguments import add_json, add_selection, new_parser
from gpt2.records.comparison import finalists
from lib import console
from lib.report.finalists import significance_to_json, significance_to_text


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    parser.add_argument("runs", nargs="?", default=os.environ.get("RUNS", ""), metavar="RUNS")
    args = parser.parse_args()
    report = finalists(args.runs, args.build_dir, steps=args.steps, seeds=args.seeds)
    print(significance_to_json(report) if args.json else significance_to_text(report), end="")
    return report.exit_code


if __name__ == "__main__":
    console.run_main(main)
