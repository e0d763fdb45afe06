#!/usr/bin/env python3
"""Judge finished runs by their own files: VALID, or INVALID and why, one line a finding.

    audit_run.py --run "ratio/*"                          runs of the plan of .config
    audit_run.py --run results/single/run-s1-1a2b3c4d     the run of that directory

Every file is there and as it should be, agrees with its digest, and can be computed again from the
others; evaluation documents are compared with the data where it is at hand. Exit codes: 0 all are
valid, 6 one is not, 2 no such run.
"""

import _start

from gpt2 import audit
from gpt2.arguments import add_json, add_selection, add_variable, new_parser
from gpt2.finished import find_started
from lib import cli
from lib.errors import EXIT_DONE, EXIT_INVALID


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "run", "directory of a run, or patterns that name some")
    add_json(parser)
    given = parser.parse_args()
    runs = find_started(given.run, given.build_dir, steps=given.steps, seeds=given.seeds)
    verdicts = [audit.audit(run, given.build_dir) for run in runs]
    print(audit.to_json(verdicts) if given.json else audit.to_text(verdicts))
    return EXIT_DONE if all(verdict.valid for verdict in verdicts) else EXIT_INVALID


if __name__ == "__main__":
    cli.run(main)
