#!/usr/bin/env python3
"""Write the model of a finished run to a folder that transformers loads, tokenizer included.

    export.py run                                the run of that name in the plan of .config
    export.py results/single/run-s1-1a2b3c4d     the run of that directory
    export.py ra --seeds 2 --to models/ra        where there are several, and where to put it

Without --to it is the folder "export" of the run's directory. A model with parts that transformers
has not is written with our weights, and gpt2.weights.load.load_run loads it. Prints the folder.
Exit codes: 2 no such run, not done, or the folder holds something else; 3 damaged weights.
"""

from pathlib import Path

import _start

from gpt2.arguments import add_selection, new_parser
from gpt2.finished import find_finished
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", default="", help="the new folder")
    given = parser.parse_args()
    run = find_finished(given.run, given.build_dir, steps=given.steps, seeds=given.seeds)
    # Loads torch, which a wrong name need not wait for.
    from gpt2.weights.export import export

    target = Path(given.to) if given.to else run.path / "export"
    export(run, target, given.build_dir)
    print(target)
    return 0


if __name__ == "__main__":
    cli.run(main)
