#!/usr/bin/env python3
"""Audit runs from their files: VALID, or INVALID with one line per finding.

    audit_run.py --runs "ratio/*"                          runs of the plan of .config
    audit_run.py --runs results/single/run-s1-1a2b3c4d     a run directory

Checks that every file exists, is well-formed, matches its digest, and agrees with the values
recomputed from the other files. Evaluation documents are compared with the data set if it is
available. Exit codes: 0 all runs are valid, 6 a run is invalid, 2 no such run.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_lookup,
    add_variable,
    asked_lookup,
    new_parser,
)
from gpt2.records import audit
from gpt2.records.run_files import find_started
from lib import console
from lib.errors import EXIT_DONE, EXIT_INVALID
from lib.make_variables import require_value


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_lookup(parser)
    add_variable(parser, "runs", "run directory, or patterns over run names")
    add_json(parser)
    args = parser.parse()
    runs = find_started(
        require_value(args.runs, "RUNS", "make audit RUNS=NAME"),
        args.build_dir,
        asked_lookup(args),
    )
    verdicts = [audit.audit(run, args.build_dir) for run in runs]
    console.show(audit.to_json(verdicts) if args.json else audit.to_text(verdicts))
    return EXIT_DONE if all(verdict.valid for verdict in verdicts) else EXIT_INVALID


if __name__ == "__main__":
    console.run_main(main)
