#!/usr/bin/env python3
"""Evaluate a finished run again, unchanged or with quantized weights.

    evaluate.py --run ra                       unchanged: reproduces the recorded figures
    evaluate.py --run ra --quant int8          8 bits, one scale per output
    evaluate.py --run ra --quant nf4,fp4       4 bits; requires make setup EXTRAS=bitsandbytes

A run is a directory, or a shell pattern that matches one run of .config. Results are written to
evaluations/QUANT in the run directory; the files of the run are not modified. Training does not
support quantization. Prints a table with one label per QUANT. Exit codes: 2 no such run or QUANT, 3
a package, the data or the weights are missing.
"""

import _start

from gpt2.planning.arguments import new_parser
from gpt2.running.finished import add_evaluation_args, evaluate
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_evaluation_args(parser)
    console.show(evaluate(parser.parse()))
    return 0


if __name__ == "__main__":
    console.run_main(main)
