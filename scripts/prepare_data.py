#!/usr/bin/env python3
"""Prepare the configured data set: download, tokenize, split, digest.

It is made once: a data set that is there is left alone. Prints its folder. --verify also checks
every byte of it against its manifest. Exit 3 when it cannot be made or is damaged.
"""

import argparse
from pathlib import Path

import _start

from gpt2.config import load_config
from gpt2.data.prepare import prepare
from gpt2.data.store import open_dataset
from lib.cli import run
from lib.console import say


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-O", "--build-dir", metavar="DIR", type=Path, default=Path("."))
    parser.add_argument("--verify", action="store_true", help="check every byte")
    arguments = parser.parse_args()
    config = load_config(arguments.build_dir).data
    folder = prepare(config, arguments.build_dir)
    if arguments.verify:
        dataset = open_dataset(config, arguments.build_dir)
        say("DATA", f"{folder.name}: every byte as it was made, digest {dataset.digest}")
    print(folder)
    return 0


if __name__ == "__main__":
    run(main)
