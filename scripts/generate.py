#!/usr/bin/env python3
"""Write text with a finished run.

    generate.py --run ra --prompt "The people"
    generate.py --run results/ratio/ra-s1-0a1b2c3d --tokens 200 --temperature 0.8 --top-p 0.95
    generate.py --run ra --temperature 0 --json

A run is a directory, or a shell pattern over slugs, numbers and labels that names one run of
.config. Temperature 0 takes the most likely token each time; 1 is the model's own distribution. The
same seed on the same machine gives the same text. Text goes to stdout as it is written, the rest to
stderr. Exit 2 where there is no such run, it is not finished, or a number means nothing.
"""

import json
import sys

import _start

from gpt2.arguments import add_json, add_writing, new_parser
from gpt2.finished import find_finished
from gpt2.trained import open_trained
from gpt2.write import order, to_record, write
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_writing(parser)
    add_json(parser)
    given = parser.parse_args()
    wanted = order(given)
    run = find_finished(given.run, given.build_dir, seeds=given.seeds)
    trained = open_trained(run, given.build_dir)
    sys.stdout.reconfigure(encoding="utf-8")
    if given.json:
        texts = write(trained, wanted, lambda piece: None)
        print(json.dumps(to_record(trained, wanted, texts), sort_keys=True, allow_nan=False))
    else:
        write(trained, wanted, lambda piece: print(piece, end="", flush=True))
    return 0


if __name__ == "__main__":
    cli.run(main)
