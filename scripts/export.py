#!/usr/bin/env python3
"""Export the model and tokenizer of a finished run to a folder that transformers can load.

    export.py run                                a run name in the plan of .config
    export.py results/single/run-s1-1a2b3c4d     a run directory
    export.py ra --seeds 2 --out models/ra        one seed, and the output folder

The default output is the folder "export" of the run directory. A model with components that
transformers does not support is written with its own code, for trust_remote_code=True. Prints the
folder. Exit codes: 2 unknown or unfinished run, or the folder is in use; 3 damaged weights.
"""

from pathlib import Path

import _start

from gpt2.planning.arguments import (
    add_lookup,
    add_positional,
    add_variable,
    asked_lookup,
    new_parser,
)
from gpt2.records.run_files import find_finished
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_lookup(parser)
    add_positional(parser, "run", "directory of a finished run, or a run name")
    add_variable(parser, "out", "output folder")
    args = parser.parse()
    run = find_finished(args.run, args.build_dir, asked_lookup(args))
    # Imports torch: report a wrong run name without that delay.
    from gpt2.weights.export import export

    target = Path(args.out) if args.out else run.path / "export"
    export(run, target, args.build_dir)
    console.show(f"{target}\n")
    return 0


if __name__ == "__main__":
    console.run_main(main)
