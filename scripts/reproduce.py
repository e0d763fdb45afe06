#!/usr/bin/env python3
"""Train a finished run again from its directory alone, and compare the bytes.

    reproduce.py --run DIR                 with the data that the build folder has, or prepares
    reproduce.py --run DIR --data DATA     with a data folder, or the text of a custom data set
    reproduce.py --run DIR --force         in spite of what differs

Needs no .config and changes none. What comes of it lies in the folder "reproduced" of the build
folder. Prints BITWISE, DIVERGED with the first field that differs, or NOT COMPARABLE with every
reason: another torch, device, data set, or other code. A run that was made with edits beside its
commit is trained in a copy of the tree that has both. Exit codes: 0 the same bytes, 1 diverged or
failed, 2 no such run, 3 machine or data, 4 not comparable.
"""

import _start

from gpt2.arguments import add_force, add_json, add_variable, new_parser
from gpt2.reproduce import Request, reproduce
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "run", "directory of a finished run, or a name that make plan lists")
    add_variable(parser, "data", "a data folder, or the text of a custom data set")
    add_force(parser)
    add_json(parser)
    given = parser.parse_args()
    request = Request(given.run, given.build_dir, given.data, force=given.force, json=given.json)
    code, text = reproduce(request)
    print(text, end="")
    return code


if __name__ == "__main__":
    cli.run(main)
