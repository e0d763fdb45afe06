#!/usr/bin/env python3
"""Generate text with a finished run.

    generate.py --run ra --prompt "The people"
    generate.py --run results/ratio/ra-s1-0a1b2c3d --tokens 200 --temperature 0.8 --top-p 0.95
    generate.py --run ra --temperature 0 --json

A run is a directory, or a shell pattern over slugs, numbers and labels that matches one run of
.config. Temperature 0 is greedy decoding; 1 samples from the unscaled distribution. The same seed on
the same machine produces the same text. Text is streamed to stdout, log lines go to stderr. Exit
code 2: no such run, the run is not finished, or a value is invalid.
"""

import json
import sys
from io import TextIOWrapper

import _start

from gpt2.planning.arguments import RunLookup, add_json, add_writing, new_parser
from gpt2.records.run_files import find_finished
from gpt2.running.finished import generate_texts, request_from_args, to_record
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_writing(parser)
    add_json(parser)
    args = parser.parse()
    run = find_finished(args.run, args.build_dir, RunLookup(seeds=args.seeds))
    request = request_from_args(args)
    # Imports torch, which takes longer than the search.
    from gpt2.weights.trained import open_trained

    trained = open_trained(run, args.build_dir)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    if args.json:
        texts = generate_texts(trained, request, lambda piece: None)
        console.show(
            json.dumps(to_record(trained, request, texts), sort_keys=True, allow_nan=False) + "\n"
        )
    else:
        generate_texts(trained, request, console.show)
    return 0


if __name__ == "__main__":
    console.run_main(main)
