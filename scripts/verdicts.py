#!/usr/bin/env python3
"""Print the verdict on every comparison of .config's study: better, worse, equivalent, or neither.

    verdicts.py --seeds 1-5

Each line has the difference in nats per token, its 95 % interval over seeds, the number of seeds, and p
corrected for all comparisons of the study. Writes verdicts.json, the tables and report.html beside the
runs. Exit
codes: 0 whatever the words are, 1 a seed diverged, 2 no run has a result, 4 runs are not comparable
or the A/A step failed, 5 with --strict: a comparison is INCONCLUSIVE.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_selection,
    add_strict,
    asked_tables,
    new_parser,
)
from gpt2.running import launch
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    add_strict(parser)
    args = parser.parse()
    plan, whole, selected = asked_tables(args)
    code, text = launch.verdicts(plan, whole, selected=selected, json=args.json, strict=args.strict)
    console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
