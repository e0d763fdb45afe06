#!/usr/bin/env python3
"""Evaluate a finished run again, as it is or with its weights rounded to a few bits.

    evaluate.py --run ra                       the run's own figures, found again
    evaluate.py --run ra --quant int8          8 bits, a scale for each output
    evaluate.py --run ra --quant nf4,fp4       4 bits; needs make setup EXTRAS=bitsandbytes

A run is a directory, or a shell pattern that names one run of .config. The results lie in
evaluations/QUANT of the run's directory, whose own files stay as they are; training has no such
thing. Prints a table with a label for each. Exit 2 where there is no such run or QUANT, 3 where a
package, the data or the weights are missing.
"""

import _start

from gpt2.arguments import new_parser
from gpt2.quantized.command import add_evaluating, evaluate
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_evaluating(parser)
    print(evaluate(parser.parse_args()), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
